//! What ranks of a pipeline send each other: tensors, and what is said of them.

use flow_autograd::BoxError;
use flow_global::{from_local, GlobalTensor, Placement, Sbp, B, P, S};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::micro_batch::MicroBatch;

/// Comes before the tensors. So that any micro-batch may have other shapes than the one before.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// The receive that this is for, as its action is displayed.
    pub receive: String,
    pub micro_batch: MicroBatch,
    /// None stands for a gradient that there is none of.
    pub tensors: Vec<Option<Description>>,
}

/// A tensor without its elements.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Description {
    /// A place in [`KINDS`].
    kind: usize,
    /// Of what is sent: a global tensor's local.
    sizes: Vec<i64>,
    requires_grad: bool,
    layout: Option<Layout>,
}

/// Of a global tensor.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
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
    /// What is said of a tensor, and what is sent of it: contiguous, in memory of the host.
    pub fn of(tensor: &Tensor) -> Result<(Self, Tensor), BoxError> {
        let (local, layout) = match tensor.is_global() {
            true => {
                let sbp = tensor.sbp()?.iter().map(ToString::to_string).collect();
                (tensor.to_local()?, Some(Layout { sizes: tensor.size(), sbp }))
            }
            false => (tensor.shallow_clone(), None),
        };
        let kind = KINDS.iter().position(|&kind| kind == local.kind());
        let kind =
            kind.ok_or_else(|| format!("tensors of kind {:?} cannot be sent", local.kind()))?;
        let (sizes, requires_grad) = (local.size(), tensor.requires_grad());
        let local = local.detach().to_device(Device::Cpu).contiguous();
        Ok((Self { kind, sizes, requires_grad, layout }, local))
    }

    /// Room for what is sent.
    pub fn empty(&self) -> Result<Tensor, BoxError> {
        let kind = *KINDS.get(self.kind).ok_or("a message has a tensor of an unknown kind")?;
        Ok(Tensor::f_empty(&self.sizes[..], (kind, Device::Cpu))?)
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
}
