//! A pipeline's schedule of one forward, one backward: in its steady state each stage sends to and
//! receives from the same neighbour at once.

use std::collections::VecDeque;

use anyhow::{Result, ensure};
use flow_tensor::{P2pOp, ProcessGroup, TensorCollectives};
use tch::{Kind, Tensor};

const MICRO_BATCHES: usize = 9;
const SHAPE: [i64; 2] = [70, 300];

type Exchange = fn(&ProcessGroup, Vec<P2pOp<Tensor>>) -> Result<()>;

pub fn blocking(group: &ProcessGroup) -> Result<()> {
    one_forward_one_backward(group, |group, mut ops| Ok(group.batch_send_recv_tensors(&mut ops)?))
}

pub fn nonblocking(group: &ProcessGroup) -> Result<()> {
    one_forward_one_backward(group, |group, ops| {
        drop(group.batch_send_recv_tensors_async(ops)?.wait()?);
        Ok(())
    })
}

fn weight(group: &ProcessGroup, stage: usize) -> Tensor {
    let weight = Tensor::full(SHAPE, 0.5 + stage as f64 / 10.0, (Kind::Double, group.device()));
    weight.set_requires_grad(true)
}

fn input(group: &ProcessGroup, micro_batch: usize) -> Tensor {
    let numbers = Tensor::arange(SHAPE[0] * SHAPE[1], (Kind::Double, group.device()));
    (numbers + micro_batch as f64).sin().view(SHAPE)
}

fn forward(x: &Tensor, weight: &Tensor) -> Tensor {
    (x * weight).tanh()
}

/// One stage, and its messages to the stages before and after it.
struct Stage<'a> {
    group: &'a ProcessGroup,
    exchange: Exchange,
    weight: Tensor,
    /// Inputs and outputs of the forwards that have had no backward.
    open: VecDeque<(Tensor, Tensor)>,
    forwards: usize,
}

impl Stage<'_> {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn is_last(&self) -> bool {
        self.rank() + 1 == self.group.world_size()
    }

    /// Sends `output` to the next stage, if there is one, and receives its gradient with it.
    fn with_next(&self, output: Option<&Tensor>, receive: bool) -> Result<Option<Tensor>> {
        if self.is_last() { Ok(None) } else { self.with(self.rank() + 1, output, receive) }
    }

    fn with_previous(&self, gradient: Option<&Tensor>, receive: bool) -> Result<Option<Tensor>> {
        match self.rank() {
            0 => Ok(None),
            rank => self.with(rank - 1, gradient, receive),
        }
    }

    fn with(&self, peer: usize, sent: Option<&Tensor>, receive: bool) -> Result<Option<Tensor>> {
        let received = receive.then(|| Tensor::zeros(SHAPE, (Kind::Double, self.group.device())));
        let send = sent.map(|data| P2pOp::Send { data: data.detach(), to: peer });
        let recv = received
            .as_ref()
            .map(|buffer| P2pOp::Recv { buffer: buffer.shallow_clone(), from: peer });
        (self.exchange)(self.group, send.into_iter().chain(recv).collect())?;
        Ok(received)
    }

    fn forward(&mut self, received: Option<Tensor>) -> Tensor {
        let x = received.unwrap_or_else(|| input(self.group, self.forwards));
        self.forwards += 1;
        let x = x.set_requires_grad(true);
        let y = forward(&x, &self.weight);
        self.open.push_back((x, y.shallow_clone()));
        y
    }

    /// The gradient of the oldest open forward's input.
    fn backward(&mut self, received: Option<Tensor>) -> Result<Tensor> {
        let Some((x, y)) = self.open.pop_front() else { anyhow::bail!("no forward is open") };
        let loss = match received {
            Some(gradient) => y * gradient,
            None => y.square(),
        };
        loss.sum(Kind::Double).f_backward()?;
        Ok(x.grad())
    }
}

fn one_forward_one_backward(group: &ProcessGroup, exchange: Exchange) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.world_size());
    let weight_of_stage = weight(group, rank);
    let mut stage = Stage {
        group,
        exchange,
        weight: weight_of_stage.shallow_clone(),
        open: VecDeque::new(),
        forwards: 0,
    };
    let warm_up = ranks - 1 - rank;
    for _ in 0..warm_up {
        let received = stage.with_previous(None, true)?;
        let output = stage.forward(received);
        stage.with_next(Some(&output), false)?;
    }
    let mut received = stage.with_previous(None, true)?;
    for step in warm_up..MICRO_BATCHES {
        let output = stage.forward(received);
        let gradient = stage.with_next(Some(&output), true)?;
        let gradient = stage.backward(gradient)?;
        received = stage.with_previous(Some(&gradient), step + 1 < MICRO_BATCHES)?;
    }
    for _ in 0..warm_up {
        let gradient = stage.with_next(None, true)?;
        let gradient = stage.backward(gradient)?;
        stage.with_previous(Some(&gradient), false)?;
    }

    // The same with all stages in one process.
    let weights: Vec<Tensor> = (0..ranks).map(|stage| weight(group, stage)).collect();
    for micro_batch in 0..MICRO_BATCHES {
        let output =
            weights.iter().fold(input(group, micro_batch), |x, weight| forward(&x, weight));
        output.square().sum(Kind::Double).f_backward()?;
    }
    let difference = weight_of_stage.grad() - weights[rank].grad();
    let difference = difference.abs().max().double_value(&[]);
    ensure!(difference < 1e-12, "the gradient of stage {rank} differs by {difference}");
    Ok(())
}
