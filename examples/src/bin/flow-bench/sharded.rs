//! A training step with `Ddp`, `Fsdp` and `FullyShard`, with Adam and with SGD.
//!
//! Blocks of all take turns in the same processes, on models with the same weights.

use anyhow::Result;
use flow_ddp::{Ddp, Fsdp, FullyShard, ProcessGroup, TryBackwardStep};
use serde_json::json;
use tch::Tensor;
use tch::nn::{Adam, ModuleT, OptimizerConfig, Sgd, VarStore};

use crate::in_turn::{self, LEARNING_RATE, Options, Step};

pub fn run(options: &Options) -> Result<()> {
    let (group, x, y) = in_turn::begin(options.model)?;
    let bench = Bench { group: &group, options, x: &x, y: &y };
    bench.compare("adam", Adam::default())?;
    bench.compare("sgd", Sgd::default())
}

struct Bench<'a> {
    group: &'a ProcessGroup,
    options: &'a Options,
    x: &'a Tensor,
    y: &'a Tensor,
}

impl Bench<'_> {
    /// Measures all with this optimizer.
    fn compare(
        &self,
        name: &str,
        config: impl OptimizerConfig + Clone + Send + 'static,
    ) -> Result<()> {
        let mut steps =
            [self.ddp(config.clone())?, self.fsdp(config.clone())?, self.fully_shard(config)?];
        let [ddp_ms, fsdp_ms, fully_shard_ms] =
            in_turn::times(self.group, self.options, &mut steps)?;
        if self.group.rank() != 0 {
            return Ok(());
        }
        let model = self.options.model.name();
        let speedup = ddp_ms / fsdp_ms;
        if self.options.json {
            let line = json!({
                "bench": "sharded", "model": model, "ranks": self.group.world_size(), "optimizer": name,
                "ddp_ms": ddp_ms, "fsdp_ms": fsdp_ms, "fully_shard_ms": fully_shard_ms, "speedup": speedup,
            });
            println!("{line}");
        } else {
            println!(
                "step, {model}, {name}: {ddp_ms:.3} ms with Ddp, {fsdp_ms:.3} ms with Fsdp, {speedup:.2} \
                 times as fast; {fully_shard_ms:.3} ms with FullyShard"
            );
        }
        Ok(())
    }

    fn ddp(&self, config: impl OptimizerConfig) -> Result<Step> {
        let x = self.x.shallow_clone();
        let y = self.y.shallow_clone();
        let vs = self.store();
        let model = Ddp::new(self.options.model.build(&vs.root()), &vs, self.group)?;
        let mut optimizer = config.build(&vs, LEARNING_RATE)?;
        Ok(Box::new(move || {
            let loss = model.forward_t(&x, true).cross_entropy_for_logits(&y);
            Ok(optimizer.try_backward_step(&loss)?)
        }))
    }

    fn fsdp(&self, config: impl OptimizerConfig + Send + 'static) -> Result<Step> {
        let x = self.x.shallow_clone();
        let y = self.y.shallow_clone();
        let vs = self.store();
        let model = Fsdp::new(self.options.model.build(&vs.root()), &vs, self.group)?;
        let optimizer = model.optimizer(config, LEARNING_RATE)?;
        Ok(Box::new(move || {
            let loss = model.forward_t(&x, true).cross_entropy_for_logits(&y);
            Ok(optimizer.backward_step(&loss)?)
        }))
    }

    fn fully_shard(&self, config: impl OptimizerConfig + Send + 'static) -> Result<Step> {
        let x = self.x.shallow_clone();
        let y = self.y.shallow_clone();
        let vs = self.store();
        let shard = FullyShard::new(&vs, self.group)?;
        let net = self.options.model.build_sharded(&vs.root(), &shard)?;
        let model = shard.wrap(net)?;
        let optimizer = model.optimizer(config, LEARNING_RATE)?;
        Ok(Box::new(move || {
            let loss = model.forward_t(&x, true).cross_entropy_for_logits(&y);
            Ok(optimizer.backward_step(&loss)?)
        }))
    }

    /// Returns a store for the same weights each time.
    fn store(&self) -> VarStore {
        tch::manual_seed(0);
        VarStore::new(self.x.device())
    }
}
