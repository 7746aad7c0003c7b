//! What ranks of a pipeline send each other: tensors, and what is said of them.

use std::collections::HashMap;
use std::fmt;

use flow_autograd::BoxError;
use flow_global::{from_local, GlobalTensor, Placement, Sbp, B, P, S};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::micro_batch::MicroBatch;

/// Comes before the tensors, whose rows may differ.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// The receive that this is for, as its action is displayed.
    pub receive: String,
    pub micro_batch: MicroBatch,
    /// None stands for a gradient that there is none of.
    pub tensors: Vec<Option<Description>>,
}

/// A tensor without its elements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Description {
    /// A place in [`KINDS`].
    kind: usize,
    /// Of what is sent: a global tensor's local.
    sizes: Vec<i64>,
    requires_grad: bool,
    layout: Option<Layout>,
}

/// Of a global tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Layout {
    sizes: Vec<i64>,
    sbp: Vec<String>,
}

const KINDS: [Kind; 12] = [
    Kind::Uint8,
    Kind::Int8,
    Kind::Int16,
    Kind::Int,
    Kind::Int64,
    Kind::Half,
    Kind::Float,
    Kind::Double,
    Kind::ComplexFloat,
    Kind::ComplexDouble,
    Kind::Bool,
    Kind::BFloat16,
];

impl Description {
    fn of(tensor: &Tensor) -> Result<Self, BoxError> {
        let local = local_of(tensor)?;
        if let Some(reason) = flow_autograd::unsendable(&local) {
            return Err(format!("a tensor that goes to another stage {reason}").into());
        }
        let kind = KINDS.iter().position(|&kind| kind == local.kind());
        let kind =
            kind.ok_or_else(|| format!("tensors of kind {:?} cannot be sent", local.kind()))?;
        let layout = match tensor.is_global() {
            true => {
                let sbp = tensor.sbp()?.iter().map(ToString::to_string).collect();
                Some(Layout { sizes: tensor.size(), sbp })
            }
            false => None,
        };
        Ok(Self { kind, sizes: local.size(), requires_grad: tensor.requires_grad(), layout })
    }

    /// Whether a micro-batch of `rows` rows may have this where one of `other_rows` has `other`: what
    /// the rows make of a size may differ.
    fn fits(&self, rows: i64, other: &Self, other_rows: i64) -> bool {
        let fits = |sizes: &[i64], others: &[i64]| {
            let mut pairs = sizes.iter().zip(others);
            sizes.len() == others.len()
                && pairs.all(|(&size, &other)| size == other || size * other_rows == other * rows)
        };
        let sizes_fit = match (&self.layout, &other.layout) {
            // Ranks may have uneven parts.
            (Some(one), Some(other)) => one.sbp == other.sbp && fits(&one.sizes, &other.sizes),
            (None, None) => fits(&self.sizes, &other.sizes),
            _ => false,
        };
        (self.kind, self.requires_grad) == (other.kind, other.requires_grad) && sizes_fit
    }

    /// Room for what is sent.
    pub fn empty(&self, device: Device) -> Result<Tensor, BoxError> {
        let kind = *KINDS.get(self.kind).ok_or("a message has a tensor of an unknown kind")?;
        Ok(Tensor::f_empty(&self.sizes[..], (kind, device))?)
    }

    /// The tensor, of what was sent: a leaf.
    pub fn tensor(
        &self,
        local: &Tensor,
        placement: Option<&Placement>,
        device: Device,
    ) -> Result<Tensor, BoxError> {
        let local = local.f_to_device(device)?;
        let tensor = match (&self.layout, placement) {
            (None, _) => local,
            (Some(layout), Some(placement)) => {
                let sbp =
                    layout.sbp.iter().map(|text| parse(text)).collect::<Result<Vec<_>, _>>()?;
                from_local(&local, &layout.sizes, placement, sbp)?
            }
            (Some(_), None) => {
                let reason =
                    "a global tensor came from another stage: say where it is on this rank \
                              by the builder's placement()";
                return Err(reason.into());
            }
        };
        Ok(tensor.set_requires_grad(self.requires_grad))
    }
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}", KINDS[self.kind], self.sizes)?;
        if let Some(Layout { sizes, sbp }) = &self.layout {
            write!(f, " of the global {sizes:?} with SBP ({})", sbp.join(", "))?;
        }
        let requires = if self.requires_grad { "requires a gradient" } else { "requires none" };
        write!(f, ", which {requires}")
    }
}

/// A tensor with its description.
pub struct Described {
    pub tensor: Tensor,
    pub description: Description,
}

impl Described {
    /// # Errors
    /// The tensor cannot be sent.
    pub fn of(tensor: Tensor) -> Result<Self, BoxError> {
        let description = Description::of(&tensor)?;
        Ok(Self { tensor, description })
    }

    /// The same as a leaf.
    pub fn without_graph(self) -> Self {
        let tensor = self.tensor.detach().set_requires_grad(self.description.requires_grad);
        Self { tensor, ..self }
    }
}

/// What this rank has of a tensor.
pub fn local_of(tensor: &Tensor) -> Result<Tensor, BoxError> {
    Ok(match tensor.is_global() {
        true => tch::no_grad(|| tensor.to_local())?,
        false => tensor.shallow_clone(),
    })
}

/// What is sent of a tensor: contiguous, and in memory of the host if that sends it.
pub fn sent(tensor: &Tensor, by_host: bool) -> Result<Tensor, BoxError> {
    let local = local_of(tensor)?.detach();
    let local = if by_host { local.f_to_device(Device::Cpu)? } else { local };
    Ok(local.f_resolve_conj()?.f_resolve_neg()?.f_contiguous()?)
}

/// The outputs of each stage in the first micro-batch of a step: the others have to be alike.
#[derive(Default)]
pub struct Firsts(HashMap<usize, (MicroBatch, Vec<Description>)>);

impl Firsts {
    /// Compares what a stage gives, or takes it as the first.
    ///
    /// # Errors
    /// The tensors are not alike.
    pub fn check(
        &mut self,
        stage: usize,
        micro_batch: MicroBatch,
        outputs: &[Described],
    ) -> Result<(), BoxError> {
        let own = outputs.iter().map(|output| &output.description);
        let Some((first, others)) = self.0.get(&stage) else {
            self.0.insert(stage, (micro_batch, own.cloned().collect()));
            return Ok(());
        };
        let number = first.index;
        if own.len() != others.len() {
            let (now, then) = (own.len(), others.len());
            return Err(format!(
                "the number of outputs is {now}, but in micro-batch {number} it was {then}"
            )
            .into());
        }
        for (at, (own, other)) in own.zip(others).enumerate() {
            if !own.fits(micro_batch.rows, other, first.rows) {
                return Err(format!(
                    "output {at} is {own}, but in micro-batch {number} it was {other}: give each \
                     micro-batch of a step the same, but for its rows"
                )
                .into());
            }
        }
        Ok(())
    }
}

fn parse(text: &str) -> Result<Sbp, BoxError> {
    let dim = || text.strip_prefix("S(")?.strip_suffix(')')?.parse().ok();
    match text {
        "B" => Ok(B),
        "P" => Ok(P),
        _ => dim().map(S).ok_or_else(|| format!("a tensor of SBP {text} cannot be sent").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sbps_come_as_they_went() {
        for sbp in [B, P, S(0), S(17)] {
            assert_eq!(parse(&sbp.to_string()).unwrap(), sbp);
        }
        assert!(parse("P(Max)").is_err());
    }

    #[test]
    fn micro_batches_may_differ_in_rows_only() {
        let global = |kind, local: i64, sizes: [i64; 2], sbp: [&str; 2]| Description {
            kind,
            sizes: vec![local, sizes[1]],
            requires_grad: true,
            layout: Some(Layout { sizes: sizes.into(), sbp: sbp.map(str::to_owned).into() }),
        };
        // Ten rows, then eight, over four ranks: this one has three, then two.
        let first = global(6, 3, [10, 4], ["S(0)", "S(0)"]);
        assert!(global(6, 2, [8, 4], ["S(0)", "S(0)"]).fits(4, &first, 5));
        assert!(!global(7, 2, [8, 4], ["S(0)", "S(0)"]).fits(4, &first, 5));
        assert!(!global(6, 2, [8, 4], ["S(0)", "B"]).fits(4, &first, 5));
        assert!(!global(6, 2, [8, 6], ["S(0)", "S(0)"]).fits(4, &first, 5));
        let plain = |sizes: [i64; 2]| Description {
            kind: 6,
            sizes: sizes.into(),
            requires_grad: true,
            layout: None,
        };
        assert!(!plain([2, 4]).fits(4, &first, 5));
        assert!(plain([4, 4]).fits(4, &plain([5, 4]), 5));
        assert!(!plain([3, 4]).fits(4, &plain([5, 4]), 5));
    }
}
