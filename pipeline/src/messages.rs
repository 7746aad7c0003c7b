//! Sending and receiving beside the computations.
//!
//! Sends and receives of a pair of ranks are in one order on both sides, which the schedule has
//! made sure of. So each rank has two threads for each other rank that it talks to, flow-comm's
//! lanes, which send and receive whatever the rank computes meanwhile: no rank waits for a
//! receiver, and large messages need not be received when they are sent.

use std::collections::{HashMap, VecDeque};

use flow_autograd::BoxError;
use flow_comm::{Lane, ProcessGroup, Work};
use flow_plan::schedule::{Action, Schedule};
use flow_tensor::TensorCollectives;
use tch::{Device, Tensor};

use crate::links::{Link, Links};
use crate::message::{sent, Described, Description, Header};
use crate::micro_batch::MicroBatch;

/// Receives that are under way from each rank: one for what is computed next, and one after it.
const AHEAD: usize = 2;

type Outcome<T> = Result<T, BoxError>;

/// The messages of one step.
pub struct Messages<'a> {
    group: &'a ProcessGroup,
    /// On GPUs: the way of tensors.
    links: Option<&'a Links>,
    device: Device,
    schedule: &'a Schedule,
    sends: Vec<Work<Outcome<()>>>,
    /// By the rank that they are from.
    from: HashMap<usize, Receives>,
}

#[derive(Default)]
struct Receives {
    /// Not begun yet.
    left: VecDeque<Action>,
    under_way: VecDeque<Work<Outcome<Received>>>,
}

/// A message.
pub struct Received {
    pub header: Header,
    /// What came of each tensor that there is.
    pub locals: Vec<Tensor>,
    /// What is on its way to them, on GPUs.
    under_way: Vec<flow_tensor::Work>,
}

impl<'a> Messages<'a> {
    /// For a rank that carries out these actions.
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
        let receive = receive.to_string();
        let header = serde_json::to_vec(&Header { receive, micro_batch, tensors: descriptions })?;
        let link = self.links.and_then(|links| links.to(to));
        let link = link.map(|link| Outcome::Ok((link.so_far()?, link))).transpose()?;
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

    /// Waits for what is received next from the rank of this receive.
    pub fn receive(&mut self, action: Action) -> Outcome<Received> {
        let from = sender(self.schedule, action).ok_or("there is nothing to receive")?;
        let receives = self.from.get_mut(&from).ok_or("there is nothing to receive")?;
        let next = receives.under_way.pop_front().ok_or("there is nothing to receive")?;
        self.begin_receives(from)?;
        let mut received = next.wait()??;
        for work in received.under_way.drain(..) {
            drop(work.wait()?);
        }
        let came = &received.header.receive;
        if *came != action.to_string() {
            return Err(format!(
                "the rank's message is for the {came}: give all ranks the same schedule"
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
        let link = self.links.and_then(|links| links.from(from));
        let device = match link {
            Some(_) => self.device,
            None => Device::Cpu,
        };
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
    let mut under_way = Vec::new();
    let receive = |description: &Description| {
        let mut local = description.empty(device)?;
        match link {
            _ if local.numel() == 0 => {}
            Some(link) => under_way.push(link.receive(local.shallow_clone())?),
            None => group.recv_tensor(&mut local, from)?,
        }
        Outcome::Ok(local)
    };
    let locals = header.tensors.iter().flatten().map(receive).collect::<Outcome<_>>()?;
    Ok(Received { header, locals, under_way })
}

/// The rank that a receive is from.
fn sender(schedule: &Schedule, action: Action) -> Option<usize> {
    action.send().map(|send| schedule.rank_of(send.stage()))
}
