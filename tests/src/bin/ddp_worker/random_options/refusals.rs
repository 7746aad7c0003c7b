//! Which options cannot be combined, and what the errors say.

use tch::Kind;

use super::model::{Layer, Operation, When};
use super::training::{Averages, Before, Hook, Phase, Steps, Training};

/// An error that a training must end with, or may.
#[derive(Debug)]
pub struct Refusal {
    /// What its text says.
    pub words: &'static [&'static str],
    pub is_certain: bool,
}

fn certain(words: &'static [&'static str]) -> Refusal {
    Refusal { words, is_certain: true }
}

impl Training {
    /// Returns the errors with which this training may end, on so many ranks.
    pub fn refusals(&self, ranks: usize) -> Vec<Refusal> {
        let mut refusals = Vec::new();
        let mixed = &self.mixed;
        let is_complex = |layer: &Layer| layer.operation == Operation::Complex;
        if mixed.param.is_some()
            && self.layers.iter().any(|layer| {
                layer.has_parameters() && (layer.kind != Kind::Float || is_complex(layer))
            })
        {
            refusals.push(certain(&["mixed_precision casts parameters from Float", "param"]));
        }
        if mixed.reduce.is_some() && matches!(self.hook, Hook::Fp16 | Hook::Bf16) {
            refusals.push(certain(&["by mixed_precision", "by the communication hook"]));
        }
        if self.buffer_hook.is_some() && !self.broadcast_buffers {
            refusals.push(certain(&["buffer_comm_hook", "broadcast_buffers"]));
        }
        let has_complex = self.layers.iter().any(is_complex);
        let is_trained = |layer: &Layer| is_complex(layer) && !layer.frozen;
        if self.averages == Averages::DiLoCo && self.layers.iter().any(is_trained) {
            refusals.push(certain(&["DiLoCo", "real floating-point numbers"]));
        }
        if has_complex && self.phases.iter().any(|phase| matches!(phase.before, Before::Resume)) {
            refusals.push(certain(&["cannot save", "is of kind Complex"]));
        }
        if self.momentum && self.phases.iter().any(|phase| matches!(phase.before, Before::Resume)) {
            // The momentum of a sparse gradient, if there is one yet.
            refusals.push(Refusal { words: &["cannot save", "it is sparse"], is_certain: false });
        }
        let is_local = matches!(self.hook, Hook::PostLocalSgd { .. });
        if is_local && self.steps.are_of_zero() {
            refusals.push(certain(&["ZeroRedundancyOptimizer", "PostLocalSgd"]));
        }
        if self.steps == Steps::ZeroInBackward && !self.named_sparse().is_empty() {
            refusals.push(certain(&["ZeroRedundancyOptimizer", "sparse_as_dense(true)"]));
        }
        if mixed.param.is_some() && self.differs_between_ranks() && !is_local {
            let words = &["is not the same on all ranks of this machine"];
            refusals.push(Refusal { words, is_certain: false });
        }
        for phase in &self.phases {
            let Some(join) = phase.join else { continue };
            if self.static_graph {
                refusals.push(certain(&["join", "static_graph(true)"]));
            }
            if is_local && !join.divide_by_initial_world_size {
                refusals.push(certain(&["join", "divide_by_initial_world_size", "PostLocalSgd"]));
            }
            match self.steps {
                Steps::InBackward => refusals.push(certain(&["join", "optimizer_in_backward"])),
                Steps::ZeroInBackward => refusals.push(certain(&["join", "hook_with_zero_step"])),
                Steps::After | Steps::Zero => {}
            }
            if self.sync_batch_norm && !join.throw_on_early_termination {
                refusals.push(certain(&["join", "throw_on_early_termination"]));
            }
        }
        self.add_sparse(ranks, &mut refusals);
        if !self.find_unused && !self.static_graph && self.leaves_some_out(ranks) {
            refusals.push(certain(&["got no gradient in this", "find_unused_parameters(true)"]));
        }
        let forwards = self.phases.iter().map(|phase| phase.forwards);
        let is_recomputed = self.layers.iter().any(|layer| layer.recomputed);
        let changes = is_recomputed && forwards.clone().max() != forwards.min();
        if self.static_graph
            && (changes || self.layers.iter().any(|layer| layer.when == When::Steps))
        {
            refusals.push(Refusal { words: &["static_graph(true)"], is_certain: false });
        }
        if !self.static_graph && self.comes_twice() {
            refusals.push(Refusal {
                words: &["got its gradient twice", "static_graph(true)"],
                is_certain: false,
            });
        }
        // Nothing is reduced on one rank, and most of this works there.
        refusals.iter_mut().for_each(|refusal| refusal.is_certain &= ranks > 1);
        refusals
    }

    /// Adds the errors of embeddings.
    fn add_sparse(&self, ranks: usize, refusals: &mut Vec<Refusal>) {
        let named = self.named_sparse();
        for (number, layer) in self.layers.iter().enumerate() {
            let Operation::Embedding { sparse } = layer.operation else { continue };
            if layer.frozen || !self.is_used(number, ranks) {
                continue;
            }
            let is_named = named.contains(&number);
            let words: &[&str] = if !sparse && is_named {
                &["is not sparse: do not name it in sparse_gradients"]
            } else if sparse && (is_named || ranks == 1) && self.steps.are_of_zero() {
                &["ZeroRedundancyOptimizer", "sparse_as_dense(true)"]
            } else if sparse && !is_named && !self.sparse_as_dense {
                &["is sparse: name it in sparse_gradients"]
            } else {
                continue;
            };
            // The sum of a sparse gradient and one that is not is not sparse.
            let is_certain = self.users(layer.tied_to.unwrap_or(number)).count() == 1;
            refusals.push(Refusal { words, is_certain });
        }
    }

    /// The layers that have the weight of a layer.
    fn users(&self, owner: usize) -> impl Iterator<Item = usize> {
        let layers = self.layers.iter().enumerate();
        let users = layers.filter(move |&(user, layer)| layer.tied_to.unwrap_or(user) == owner);
        users.map(|(user, _)| user)
    }

    /// Whether a layer is trained in this phase.
    fn is_trained(&self, layer: usize, phase: usize) -> bool {
        let own = self.layers[layer].tied_to.unwrap_or(layer);
        let mut is_trained = !self.layers[layer].frozen;
        for phase in &self.phases[..=phase] {
            match phase.before {
                Before::Refresh { layer, trains } if layer == own => is_trained = trains,
                _ => {}
            }
        }
        is_trained
    }

    /// Whether a rank has a backward that uses the layer, and trains it.
    fn is_used(&self, layer: usize, ranks: usize) -> bool {
        let mut phases = self.phases.iter().enumerate();
        phases.any(|(number, phase)| {
            let is_now = |rank: usize| {
                let mut backwards = 0..phase.number(phase.steps[rank], 0);
                backwards.any(|backward| self.layers[layer].when.is_now(rank, backward))
            };
            self.is_trained(layer, number) && (0..ranks).any(is_now)
        })
    }

    /// Whether some rank's backward leaves out a parameter that is trained.
    fn leaves_some_out(&self, ranks: usize) -> bool {
        self.phases.iter().enumerate().any(|(number, phase)| {
            (0..ranks).any(|rank| {
                phase.reductions(rank).any(|step| {
                    let mut layers = 0..self.layers.len();
                    layers.any(|layer| {
                        self.is_trained(layer, number) && self.is_left_out(layer, rank, step)
                    })
                })
            })
        })
    }

    /// Whether a backward of a rank uses no parameter of a layer's own.
    fn is_left_out(&self, number: usize, rank: usize, step: usize) -> bool {
        let layer = &self.layers[number];
        let is_now = |layer: usize| self.layers[layer].when.is_now(rank, step);
        let has_bias = matches!(layer.operation, Operation::Linear | Operation::Conv);
        let is_owner = layer.has_parameters() && layer.tied_to.is_none();
        has_bias && !is_now(number) || is_owner && !self.users(number).any(is_now)
    }

    /// Whether a parameter may get its gradient more than once in a backward.
    fn comes_twice(&self) -> bool {
        let forwards = self.phases.iter().map(|phase| phase.forwards).max().unwrap_or(1);
        (0..self.layers.len()).any(|number| {
            let users = self.users(number).map(|user| self.layers[user].recomputed);
            let recomputed: Vec<bool> = users.collect();
            let nested = recomputed.iter().filter(|&&recomputed| recomputed).count() * forwards;
            nested + usize::from(recomputed.contains(&false)) > 1
                || self.layers[number].recomputed && forwards > 1
        })
    }
}

impl Phase {
    /// The number of a backward of this phase, as [`When`] knows it.
    pub fn number(&self, step: usize, backward: usize) -> usize {
        step * self.backwards + backward
    }

    /// The numbers of a rank's backwards that reduce.
    fn reductions(&self, rank: usize) -> impl Iterator<Item = usize> {
        (0..self.steps[rank]).map(|step| self.number(step, self.backwards - 1))
    }
}
