//! A GPT (Radford et al., Language Models are Unsupervised Multitask Learners, 2019), laid out as
//! Megatron does. The layers of a stage are on a placement whose axes are data and tensor
//! parallelism.
//!
//! Between the blocks an activation of `samples x tokens x width` is split by samples over the one
//! axis and by tokens over the other (sequence parallelism). Inside of attention and of the MLP it
//! is split by heads and by features.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use flow::global::nn::{
    ColumnLinear, RowLinear, VocabEmbedding, column_linear, parallel_cross_entropy, row_linear,
    vocab_embedding,
};
use flow::global::{Result, Sbp};
use flow::plan::{Model, Transformer};
use flow::prelude::*;
use flow_autograd::{BoxError, recompute};

/// Tokens are bytes.
const VOCABULARY: i64 = 256;
/// The axis of a placement that has different samples.
pub const DATA: usize = 0;
/// The axis of a placement that splits layers.
const TENSOR: usize = 1;
/// Dimensions of an activation.
const TOKENS: usize = 1;
const DEVIATION: f64 = 0.02;
/// Dropouts of a layer.
const DRAWS: u64 = 2;

/// Sizes and numbers of the whole model.
#[derive(Clone, Copy)]
pub struct Config {
    pub layers: i64,
    pub width: i64,
    pub heads: i64,
    pub context: i64,
    pub dropout: f64,
    pub seed: u64,
    /// Whether the activations of blocks are computed again in backward.
    pub recompute: bool,
}

impl Config {
    /// Returns the layers of each stage, as the planner divides them: layer 0 is the embedding,
    /// then come the blocks, and the head is last.
    pub fn stages(&self, stages: usize) -> flow::plan::Result<Vec<Range<usize>>> {
        let [layers, hidden, heads, sequence, vocabulary] =
            [self.layers, self.width, self.heads, self.context, VOCABULARY]
                .map(|size| size as usize);
        let shape = Transformer {
            layers,
            hidden,
            heads,
            sequence,
            vocabulary,
            mlp: None,
            dropout: None,
            tied_embeddings: Some(false),
            flash_attention: Some(true),
        };
        // How many operations there are does not depend on the bytes of an element.
        Ok(Model::transformer(&shape, 1.0)?.stages(stages))
    }
}

/// The layers that one stage of the pipeline has.
pub struct Stage {
    config: Config,
    placement: Placement,
    embedding: Option<Embedding>,
    blocks: Vec<Arc<Mutex<Block>>>,
    head: Option<Head>,
    /// The number of micro-batches that went through, over the whole training.
    pub micro_batches: Arc<AtomicU64>,
}

struct Embedding {
    tokens: VocabEmbedding,
    positions: Tensor,
}

struct Block {
    number: i64,
    norms: [Norm; 2],
    qkv: ColumnLinear,
    projection: RowLinear,
    up: ColumnLinear,
    down: RowLinear,
}

struct Head {
    norm: Norm,
    logits: ColumnLinear,
}

struct Norm {
    ws: Tensor,
    bs: Tensor,
}

impl Stage {
    /// Makes the stage of these [layers](Config::stages). All ranks make all stages, in their
    /// order, and so draw the same first weights. A rank has memory for those only that are placed
    /// on it.
    pub fn new(
        path: &nn::Path,
        config: Config,
        layers: Range<usize>,
        placement: &Placement,
    ) -> Result<Self> {
        let last = config.layers as usize + 1;
        let mut stage = Self {
            config,
            placement: placement.clone(),
            embedding: None,
            blocks: Vec::new(),
            head: None,
            micro_batches: Arc::default(),
        };
        for layer in layers {
            if layer == 0 {
                stage.embedding = Some(Embedding::new(path, config, placement)?);
            } else if layer == last {
                stage.head = Some(Head::new(&(path / "head"), config.width, placement)?);
            } else {
                let number = layer as i64 - 1;
                let block = Block::new(&(path / "blocks" / number), config, number, placement)?;
                stage.blocks.push(Arc::new(Mutex::new(block)));
            }
        }
        Ok(stage)
    }

    /// Maps tokens, or the activations of the stage before, to activations, or to logits in the last
    /// stage.
    pub fn logits(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let mut x = match &self.embedding {
            Some(Embedding { tokens, positions }) => {
                let draws = self.draws(self.config.layers, train);
                draws.begin()?;
                draws.dropout(&tokens.f_forward(x)?.f_add(positions)?)?
            }
            None => x.shallow_clone(),
        };
        for block in &self.blocks {
            let draws = self.draws(lock(block).number, train);
            if train && self.config.recompute {
                x = recomputed(&x, Arc::clone(block), draws)?;
            } else {
                x = lock(block).forward(&x, &draws)?;
            }
        }
        if train {
            self.micro_batches.fetch_add(1, Ordering::Relaxed);
        }
        match &self.head {
            Some(Head { norm, logits }) => logits.f_forward(&norm.forward(&x)?),
            None => Ok(x),
        }
    }

    /// Returns the random numbers of a layer for the next micro-batch.
    fn draws(&self, layer: i64, train: bool) -> Draws {
        let micro_batch = self.micro_batches.load(Ordering::Relaxed);
        let place = (micro_batch * (self.config.layers as u64 + 1) + layer as u64) * DRAWS;
        Draws { placement: self.placement.clone(), config: self.config, place, train }
    }
}

impl Embedding {
    fn new(path: &nn::Path, config: Config, placement: &Placement) -> Result<Self> {
        let Config { width, context, .. } = config;
        let init = nn::Init::Randn { mean: 0.0, stdev: DEVIATION };
        let tokens = vocab_embedding(path / "tokens", VOCABULARY, width, placement, TENSOR, init)?;
        // Split as the activations are: by tokens.
        let sbp = [B, S(0)];
        let positions =
            global::normal(0.0, DEVIATION, [context, width], path.kind(), placement, sbp)?;
        let positions = (path / "positions").add("weight", positions, true);
        Ok(Self { tokens: tokens.scattered(TOKENS), positions })
    }
}

impl Head {
    fn new(path: &nn::Path, width: i64, placement: &Placement) -> Result<Self> {
        let norm = Norm::new(&(path / "norm"), width, placement)?;
        let linear = linear_config(DEVIATION, false);
        let logits = column_linear(path / "logits", width, VOCABULARY, placement, TENSOR, linear)?;
        Ok(Self { norm, logits })
    }
}

impl flow::pipeline::Stage for Stage {
    fn forward_micro_batch(
        &self,
        inputs: &[Tensor],
        train: bool,
    ) -> std::result::Result<Vec<Tensor>, BoxError> {
        inputs.iter().map(|input| Ok(self.logits(input, train)?)).collect()
    }
}

/// Runs a block's forward. It keeps the input only, and computes the rest again in backward.
fn recomputed(x: &Tensor, block: Arc<Mutex<Block>>, draws: Draws) -> Result<Tensor> {
    let outputs =
        recompute(&[x], move |inputs| Ok(vec![lock(&block).forward(&inputs[0], &draws)?]))?;
    Ok(outputs.into_iter().next().unwrap_or_default())
}

fn lock(block: &Mutex<Block>) -> std::sync::MutexGuard<'_, Block> {
    block.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the mean cross entropy of the targets.
pub fn loss(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let losses = parallel_cross_entropy(logits, targets)?;
    Ok(losses.f_mean(losses.kind())?)
}

/// The random numbers of a layer for a micro-batch.
struct Draws {
    placement: Placement,
    config: Config,
    /// Tensors that are drawn before.
    place: u64,
    train: bool,
}

impl Draws {
    /// Moves to this layer's numbers: the same on any layout, and when activations are computed
    /// again.
    fn begin(&self) -> Result<()> {
        global::set_rng_state(&self.placement, [!self.config.seed, self.place])
    }

    fn dropout(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.f_dropout(self.config.dropout, self.train)?)
    }
}

fn linear_config(deviation: f64, bias: bool) -> nn::LinearConfig {
    let ws_init = nn::Init::Randn { mean: 0.0, stdev: deviation };
    nn::LinearConfig { ws_init, bs_init: Some(nn::Init::Const(0.0)), bias }
}

impl Block {
    fn new(
        path: &nn::Path,
        Config { layers, width, .. }: Config,
        number: i64,
        placement: &Placement,
    ) -> Result<Self> {
        let norms = [
            Norm::new(&(path / "norm1"), width, placement)?,
            Norm::new(&(path / "norm2"), width, placement)?,
        ];
        let inner = linear_config(DEVIATION, true);
        // As GPT-2: what blocks add up to does not grow with their number.
        let last = linear_config(DEVIATION / (2.0 * layers as f64).sqrt(), true);
        let qkv = column_linear(path / "qkv", width, 3 * width, placement, TENSOR, inner)?;
        let projection = row_linear(path / "projection", width, width, placement, TENSOR, last)?;
        let up = column_linear(path / "up", width, 4 * width, placement, TENSOR, inner)?;
        let down = row_linear(path / "down", 4 * width, width, placement, TENSOR, last)?;
        Ok(Self {
            number,
            norms,
            qkv,
            projection: projection.scattered(TOKENS),
            up,
            down: down.scattered(TOKENS),
        })
    }

    fn forward(&self, x: &Tensor, draws: &Draws) -> Result<Tensor> {
        draws.begin()?;
        let [norm1, norm2] = &self.norms;
        let attended = self.qkv.f_forward(&norm1.forward(x)?)?;
        let attended = attention(&attended, draws.config.heads)?;
        let x = x.f_add(&draws.dropout(&self.projection.f_forward(&attended)?)?)?;
        let hidden = self.up.f_forward(&norm2.forward(&x)?)?.f_gelu("tanh")?;
        let x = x.f_add(&draws.dropout(&self.down.f_forward(&hidden)?)?)?;
        log::debug!("block {}: activations {:?} as {:?}", self.number, x.size(), x.sbp()?);
        Ok(x)
    }
}

/// Computes causal attention. Each token has each head's query, key and value, one after the other:
/// so that a part of them is some heads'.
fn attention(qkv: &Tensor, heads: i64) -> Result<Tensor> {
    let sizes = qkv.size();
    let [samples, tokens, width] = [sizes[0], sizes[1], sizes[2] / 3];
    let of_heads = qkv.f_view([samples, tokens, heads, 3, width / heads])?;
    let of_heads = of_heads.f_permute([3, 0, 2, 1, 4])?;
    let [q, k, v] = [0, 1, 2].map(|part| of_heads.f_select(0, part));
    let none = None::<&Tensor>;
    let attended =
        Tensor::f_scaled_dot_product_attention(&q?, &k?, &v?, none, 0.0, true, None, false)?;
    Ok(attended.f_transpose(1, 2)?.f_reshape([samples, tokens, width])?)
}

impl Norm {
    fn new(path: &nn::Path, width: i64, placement: &Placement) -> Result<Self> {
        let whole: [Sbp; 2] = [B, B];
        let ws = global::ones([width], path.kind(), placement, whole)?;
        let bs = global::zeros([width], path.kind(), placement, whole)?;
        Ok(Self { ws: path.add("weight", ws, true), bs: path.add("bias", bs, true) })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.f_layer_norm(self.ws.size(), Some(&self.ws), Some(&self.bs), 1e-5, true)?)
    }
}
