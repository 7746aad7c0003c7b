//! Messages between ranks of a pipeline: tensors with their descriptions.

use std::collections::HashMap;
use std::fmt;

use flow_global::{GlobalTensor, Placement, Sbp, from_local};
use flow_plan::schedule::Action;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::error::Outcome;
use crate::micro_batch::MicroBatch;

/// The first part of a message. The tensors follow.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// The receive that takes the message.
    pub receive: Action,
    pub micro_batch: MicroBatch,
    /// The tensors that follow. None stands for a gradient that does not exist.
    pub tensors: Vec<Option<Description>>,
}

/// A tensor without its elements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Description {
    /// An index into [`KINDS`].
    kind: usize,
    /// The sizes of the sent tensor, which is the local of a global one.
    sizes: Vec<i64>,
    requires_grad: bool,
    /// The logical tensor, if the tensor is global.
    global: Option<GlobalSizes>,
}

/// The sizes and SBP of a global tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct GlobalSizes {
    sizes: Vec<i64>,
    #[serde(with = "sbp_in_message")]
    sbp: Vec<Sbp>,
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
    fn of(tensor: &Tensor) -> Outcome<Self> {
        let local = local_of(tensor)?;
        if let Some(reason) = flow_autograd::unsendable(&local) {
            return Err(format!("a tensor that goes to another stage {reason}").into());
        }
        let kind = KINDS.iter().position(|&kind| kind == local.kind());
        let kind =
            kind.ok_or_else(|| format!("tensors of kind {:?} cannot be sent", local.kind()))?;
        let mut global = None;
        if tensor.is_global() {
            global = Some(GlobalSizes { sizes: tensor.size(), sbp: tensor.sbp()? });
        }
        Ok(Self { kind, sizes: local.size(), requires_grad: tensor.requires_grad(), global })
    }

    /// Returns whether this and `other` differ only in sizes that follow from the rows. The
    /// micro-batches have `rows` and `other_rows` rows.
    fn fits(&self, rows: i64, other: &Self, other_rows: i64) -> bool {
        if self.kind != other.kind || self.requires_grad != other.requires_grad {
            return false;
        }
        let (sizes, others) = match (&self.global, &other.global) {
            // Ranks may have uneven parts.
            (Some(one), Some(other)) if one.sbp == other.sbp => (&one.sizes, &other.sizes),
            (None, None) => (&self.sizes, &other.sizes),
            _ => return false,
        };
        let mut pairs = sizes.iter().zip(others);
        sizes.len() == others.len()
            && pairs.all(|(&size, &other)| size == other || size * other_rows == other * rows)
    }

    /// Makes an empty tensor to receive into.
    pub fn empty(&self, device: Device) -> Outcome<Tensor> {
        let kind = *KINDS.get(self.kind).ok_or("a message has a tensor of an unknown kind")?;
        Ok(Tensor::f_empty(&self.sizes[..], (kind, device))?)
    }

    /// Makes the tensor, a leaf, of the received local.
    pub fn tensor(
        &self,
        local: &Tensor,
        placement: Option<&Placement>,
        device: Device,
    ) -> Outcome<Tensor> {
        let local = local.f_to_device(device)?;
        let tensor = match (&self.global, placement) {
            (None, _) => local,
            (Some(GlobalSizes { sizes, sbp }), Some(placement)) => {
                from_local(&local, sizes, placement, sbp.clone())?
            }
            (Some(_), None) => {
                return Err(
                    "a global tensor came from another stage: say where it is on this rank \
                            by the builder's placement()"
                        .into(),
                );
            }
        };
        Ok(tensor.set_requires_grad(self.requires_grad))
    }
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}", KINDS[self.kind], self.sizes)?;
        if let Some(GlobalSizes { sizes, sbp }) = &self.global {
            let sbp: Vec<String> = sbp.iter().map(ToString::to_string).collect();
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
    /// Describes a tensor.
    ///
    /// # Errors
    /// The tensor cannot be sent.
    pub fn of(tensor: Tensor) -> Outcome<Self> {
        let description = Description::of(&tensor)?;
        Ok(Self { tensor, description })
    }

    /// Makes the tensor a leaf.
    pub fn without_graph(self) -> Self {
        let tensor = self.tensor.detach().set_requires_grad(self.description.requires_grad);
        Self { tensor, ..self }
    }
}

/// Returns this rank's part of a tensor.
pub fn local_of(tensor: &Tensor) -> Outcome<Tensor> {
    if tensor.is_global() {
        return Ok(tch::no_grad(|| tensor.to_local())?);
    }
    Ok(tensor.shallow_clone())
}

/// Returns the contiguous tensor that is sent for `tensor`, in memory of the host if the host sends it.
pub fn sent(tensor: &Tensor, by_host: bool) -> Outcome<Tensor> {
    let local = local_of(tensor)?.detach();
    let local = if by_host { local.f_to_device(Device::Cpu)? } else { local };
    Ok(flow_autograd::resolved(&local).unwrap_or(local).f_contiguous()?)
}

/// The outputs of each stage in the first micro-batch of a step. Those of the others have to be alike.
#[derive(Default)]
pub struct FirstOutputs(HashMap<usize, (MicroBatch, Vec<Description>)>);

impl FirstOutputs {
    /// Compares a stage's outputs with its first ones, or keeps them if they are the first.
    ///
    /// # Errors
    /// The tensors are not alike.
    pub fn check(
        &mut self,
        stage: usize,
        micro_batch: MicroBatch,
        outputs: &[Described],
    ) -> Outcome<()> {
        let descriptions = outputs.iter().map(|output| &output.description);
        let Some((first, expected)) = self.0.get(&stage) else {
            self.0.insert(stage, (micro_batch, descriptions.cloned().collect()));
            return Ok(());
        };
        let number = first.index;
        if outputs.len() != expected.len() {
            return Err(format!(
                "the number of outputs is {}, but in micro-batch {number} it was {}",
                outputs.len(),
                expected.len()
            )
            .into());
        }
        for (at, (description, expected)) in descriptions.zip(expected).enumerate() {
            if !description.fits(micro_batch.rows, expected, first.rows) {
                return Err(format!(
                    "output {at} is {description}, but in micro-batch {number} it was {expected}: \
                     give each micro-batch of a step the same, but for its rows"
                )
                .into());
            }
        }
        Ok(())
    }
}

/// The SBPs of a message. A partial tensor can be sent if its terms are added.
mod sbp_in_message {
    use flow_global::Sbp;
    use flow_tensor::ReduceOp;
    use serde::de::{Deserialize, Deserializer};
    use serde::ser::{Error, Serialize, Serializer};

    /// An SBP that can be sent.
    #[derive(serde::Serialize, serde::Deserialize)]
    enum Sent {
        Split(usize),
        Broadcast,
        PartialSum,
    }

    /// Writes the SBPs of a message.
    pub fn serialize<T: Serializer>(sbp: &[Sbp], serializer: T) -> Result<T::Ok, T::Error> {
        let mut sent = Vec::new();
        for &sbp in sbp {
            sent.push(match sbp {
                Sbp::Split(dim) => Sent::Split(dim),
                Sbp::Broadcast => Sent::Broadcast,
                Sbp::Partial(ReduceOp::Sum) => Sent::PartialSum,
                Sbp::Partial(_) => {
                    let error = format!("a tensor of SBP {sbp} cannot be sent");
                    return Err(T::Error::custom(error));
                }
            });
        }
        sent.serialize(serializer)
    }

    /// Reads the SBPs of a message.
    pub fn deserialize<'de, T: Deserializer<'de>>(deserializer: T) -> Result<Vec<Sbp>, T::Error> {
        let mut sbp = Vec::new();
        for sent in Vec::<Sent>::deserialize(deserializer)? {
            sbp.push(match sent {
                Sent::Split(dim) => Sbp::Split(dim),
                Sent::Broadcast => Sbp::Broadcast,
                Sent::PartialSum => Sbp::Partial(ReduceOp::Sum),
            });
        }
        Ok(sbp)
    }
}

#[cfg(test)]
mod tests {
    use flow_global::{B, P, S};
    use flow_tensor::ReduceOp;

    use super::*;

    #[test]
    fn sbps_come_as_they_went() {
        let sent = GlobalSizes { sizes: vec![18, 5], sbp: vec![B, P, S(0), S(17)] };
        let text = serde_json::to_vec(&sent).unwrap();
        assert_eq!(serde_json::from_slice::<GlobalSizes>(&text).unwrap(), sent);
    }

    /// The rank that sends has the error.
    #[test]
    fn partial_maxima_cannot_be_sent() {
        let sent = GlobalSizes { sizes: vec![5], sbp: vec![Sbp::Partial(ReduceOp::Max)] };
        let error = serde_json::to_vec(&sent).unwrap_err().to_string();
        assert!(
            error.starts_with("a tensor of SBP") && error.ends_with("cannot be sent"),
            "{error}"
        );
    }

    #[test]
    fn a_message_names_the_receive_that_takes_it() {
        let schedule = flow_plan::schedule::Schedule::zb_v(2, 3).unwrap();
        for &receive in schedule.actions(0).iter().filter(|action| action.send().is_some()) {
            let header = Header { receive, micro_batch: MicroBatch::new(1, 3, 7), tensors: vec![] };
            let text = serde_json::to_vec(&header).unwrap();
            assert_eq!(serde_json::from_slice::<Header>(&text).unwrap(), header);
        }
    }

    #[test]
    fn micro_batches_may_differ_in_rows_only() {
        let global = |kind, local: i64, sizes: [i64; 2], sbp: [Sbp; 2]| Description {
            kind,
            sizes: vec![local, sizes[1]],
            requires_grad: true,
            global: Some(GlobalSizes { sizes: sizes.into(), sbp: sbp.into() }),
        };
        // Ten rows, then eight, over four ranks: this one has three, then two.
        let first = global(6, 3, [10, 4], [S(0), S(0)]);
        assert!(global(6, 2, [8, 4], [S(0), S(0)]).fits(4, &first, 5));
        assert!(!global(7, 2, [8, 4], [S(0), S(0)]).fits(4, &first, 5));
        assert!(!global(6, 2, [8, 4], [S(0), B]).fits(4, &first, 5));
        assert!(!global(6, 2, [8, 6], [S(0), S(0)]).fits(4, &first, 5));
        let plain = |sizes: [i64; 2]| Description {
            kind: 6,
            sizes: sizes.into(),
            requires_grad: true,
            global: None,
        };
        assert!(!plain([2, 4]).fits(4, &first, 5));
        assert!(plain([4, 4]).fits(4, &plain([5, 4]), 5));
        assert!(!plain([3, 4]).fits(4, &plain([5, 4]), 5));
    }
}
