//! Sending and receiving beside the computations.
//!
//! The schedule makes sure that sends and receives of a pair of ranks have one order on both sides. So
//! each rank has two threads, lanes of flow-comm, for each neighbour: one sends and one receives while
//! the rank computes. No rank waits for a receiver, and a large message need not be received when it
//! is sent.

use std::collections::{HashMap, VecDeque};

use flow_comm::{Lane, ProcessGroup, Work};
use flow_plan::schedule::{Action, Schedule};
use flow_tensor::TensorCollectives;
use tch::{Device, Tensor};

use crate::error::Outcome;
use crate::links::{Link, Links};
use crate::message::{Described, Header, sent};
use crate::micro_batch::MicroBatch;

/// The number of receives that are under way from each rank: one for the next computation, and one
/// after it.
const AHEAD: usize = 2;

/// The messages of one step.
pub struct Messages<'a> {
    group: &'a ProcessGroup,
    /// The links of tensors, if ranks compute on GPUs.
    links: Option<&'a Links>,
    device: Device,
    schedule: &'a Schedule,
    sends: Vec<Work<Outcome<()>>>,
    /// Receives, by the rank that sends.
    from: HashMap<usize, Receives>,
}

#[derive(Default)]
struct Receives {
    /// Receives that have not begun yet.
    left: VecDeque<Action>,
    under_way: VecDeque<Work<Outcome<Received>>>,
}

/// A received message: its header and its tensors.
pub struct Received {
    pub header: Header,
    /// The local of each tensor in the header that is not None.
    pub locals: Vec<Tensor>,
    /// Receives into these tensors that are under way, on GPUs.
    under_way: Vec<flow_tensor::Work>,
}

impl<'a> Messages<'a> {
    /// Begins the first receives of a rank that carries out these actions.
    pub fn new(
        group: &'a ProcessGroup,
        links: Option<&'a Links>,
        device: Device,
        schedule: &'a Schedule,
        actions: &[Action],
    ) -> Outcome<Self> {
        let mut from = HashMap::<usize, Receives>::new();
        for &action in actions {
            if let Some(rank) = sender(schedule, action) {
                from.entry(rank).or_default().left.push_back(action);
            }
        }
        let mut messages = Self { group, links, device, schedule, sends: Vec::new(), from };
        let ranks: Vec<usize> = messages.from.keys().copied().collect();
        ranks.into_iter().try_for_each(|rank| messages.begin_receives(rank))?;
        Ok(messages)
    }

    /// Sends tensors to a rank, for a receive there.
    pub fn send(
        &mut self,
        to: usize,
        receive: Action,
        micro_batch: MicroBatch,
        tensors: Vec<Option<Described>>,
    ) -> Outcome<()> {
        let mut locals = Vec::new();
        let mut descriptions = Vec::new();
        for tensor in tensors {
            if let Some(Described { tensor, .. }) = &tensor {
                let local = sent(tensor, self.links.is_none())?;
                locals.extend(Some(local).filter(|local| local.numel() > 0));
            }
            descriptions.push(tensor.map(|tensor| tensor.description));
        }
        let header = serde_json::to_vec(&Header { receive, micro_batch, tensors: descriptions })?;
        let link = match self.links.and_then(|links| links.link_to(to)) {
            Some(link) => Some((link.so_far()?, link)),
            None => None,
        };
        self.sends.push(self.group.start(Lane::To(to), "send", move |group| {
            group.send(&[header.len() as i64][..], to)?;
            group.send(&header[..], to)?;
            Ok(match link {
                Some((stream, link)) => link.send(&locals, &stream),
                None => locals.iter().try_for_each(|local| Ok(group.send_tensor(local, to)?)),
            })
        })?);
        Ok(())
    }

    /// Waits for the message that this receive takes.
    pub fn receive(&mut self, action: Action) -> Outcome<Received> {
        let from = sender(self.schedule, action).ok_or("there is nothing to receive")?;
        let receives = self.from.get_mut(&from).ok_or("there is nothing to receive")?;
        let next = receives.under_way.pop_front().ok_or("there is nothing to receive")?;
        self.begin_receives(from)?;
        let mut received = next.wait()??;
        for work in received.under_way.drain(..) {
            drop(work.wait()?);
        }
        let taker = received.header.receive;
        if taker != action {
            return Err(format!(
                "the rank's message is for the {taker}: give all ranks the same schedule"
            )
            .into());
        }
        Ok(received)
    }

    /// Waits until all has been sent.
    pub fn finish(self) -> Outcome<()> {
        self.sends.into_iter().try_for_each(|send| send.wait()?)
    }

    fn begin_receives(&mut self, from: usize) -> Outcome<()> {
        let Some(receives) = self.from.get_mut(&from) else { return Ok(()) };
        let link = self.links.and_then(|links| links.link_from(from));
        let device = if link.is_some() { self.device } else { Device::Cpu };
        while receives.under_way.len() < AHEAD && receives.left.pop_front().is_some() {
            let link = link.clone();
            receives.under_way.push_back(self.group.start(
                Lane::From(from, 0),
                "recv",
                move |group| {
                    let mut length = [0_i64];
                    group.recv(&mut length[..], from)?;
                    let mut header = vec![0_u8; length[0] as usize];
                    group.recv(&mut header[..], from)?;
                    Ok(receive_tensors(group, link.as_ref(), device, &header, from))
                },
            )?);
        }
        Ok(())
    }
}

fn receive_tensors(
    group: &ProcessGroup,
    link: Option<&Link>,
    device: Device,
    header: &[u8],
    from: usize,
) -> Outcome<Received> {
    let header: Header = serde_json::from_slice(header)?;
    let mut locals = Vec::new();
    let mut under_way = Vec::new();
    for description in header.tensors.iter().flatten() {
        let mut local = description.empty(device)?;
        match link {
            _ if local.numel() == 0 => {}
            Some(link) => under_way.push(link.receive(local.shallow_clone())?),
            None => group.recv_tensor(&mut local, from)?,
        }
        locals.push(local);
    }
    Ok(Received { header, locals, under_way })
}

/// Returns the rank that sends what this action receives.
fn sender(schedule: &Schedule, action: Action) -> Option<usize> {
    action.send().map(|send| schedule.rank_of(send.stage()))
}
