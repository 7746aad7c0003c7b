//! Every collective in every form, on tensors of every kind and layout, against what one rank
//! computes of all ranks' tensors.

use anyhow::{Context, Result, ensure};
use flow_tensor::{P2pOp, ProcessGroup, ReduceOp, TensorCollectives, functional};
use tch::{Kind, Tensor};

const KINDS: [Kind; 10] = [
    Kind::Float,
    Kind::Double,
    Kind::Half,
    Kind::BFloat16,
    Kind::Int,
    Kind::Int64,
    Kind::Uint8,
    Kind::Int8,
    Kind::Int16,
    Kind::Bool,
];

const OPS: [ReduceOp; 5] =
    [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max];

#[derive(Clone, Copy, Debug)]
enum Form {
    Blocking,
    Async,
    Differentiable,
}

#[derive(Clone, Copy, Debug)]
enum Layout {
    Contiguous,
    Transposed,
}

struct Case<'a> {
    group: &'a ProcessGroup,
    form: Form,
    kind: Kind,
    layout: Layout,
    /// Of each rank's part.
    shape: Vec<i64>,
}

pub fn all(group: &ProcessGroup) -> Result<()> {
    for kind in KINDS {
        for layout in [Layout::Contiguous, Layout::Transposed] {
            for form in [Form::Blocking, Form::Async, Form::Differentiable] {
                // Nothing, a little and, of one kind, more than is staged at once.
                let large = (kind == Kind::Float).then(|| vec![301, 230]);
                for shape in [vec![0, 3], vec![2, 3]].into_iter().chain(large) {
                    let case = Case { group, form, kind, layout, shape };
                    let context = || format!("{form:?} {kind:?} {layout:?} {:?}", case.shape);
                    case.run().with_context(context)?;
                }
            }
        }
    }
    Ok(())
}

impl Case<'_> {
    fn run(&self) -> Result<()> {
        let reducible = !matches!(self.kind, Kind::Int8 | Kind::Int16 | Kind::Bool);
        for op in OPS.into_iter().filter(|_| reducible) {
            if matches!(
                (self.form, op),
                (Form::Blocking | Form::Async, _) | (_, ReduceOp::Sum | ReduceOp::Avg)
            ) {
                self.reductions(op).with_context(|| op.name())?;
            }
        }
        self.gathers().context("gathers")?;
        for root in 0..self.ranks() {
            self.rooted(root).with_context(|| format!("root {root}"))?;
        }
        self.all_to_all().context("all_to_all")?;
        self.uneven().context("uneven")?;
        if self.ranks() > 1 {
            self.messages().context("messages")?;
            self.batches().context("batches")?;
        }
        Ok(())
    }

    fn ranks(&self) -> usize {
        self.group.world_size()
    }

    fn rank(&self) -> usize {
        self.group.rank()
    }

    /// The values of a rank's tensor, the same wherever they are computed: small integers, so that
    /// sums are exact.
    fn values(&self, rank: usize, shape: &[i64]) -> Tensor {
        let count = shape.iter().product::<i64>();
        let values =
            Tensor::arange(count, (Kind::Int64, self.group.device())) * 3 + 5 * rank as i64;
        let values = values.remainder(7).view(shape);
        match self.kind {
            Kind::Bool => values.gt(3),
            kind => values.to_kind(kind),
        }
    }

    /// All ranks' values, stacked.
    fn stacked(&self, shape: &[i64]) -> Tensor {
        let all: Vec<Tensor> = (0..self.ranks()).map(|rank| self.values(rank, shape)).collect();
        Tensor::stack(&all, 0)
    }

    fn laid_out(&self, values: Tensor) -> Tensor {
        match self.layout {
            Layout::Contiguous => values,
            Layout::Transposed => values.transpose(0, -1).contiguous().transpose(0, -1),
        }
    }

    fn own(&self) -> Tensor {
        self.laid_out(self.values(self.rank(), &self.shape))
    }

    /// This rank's tensor with a first dimension of ranks before the shape.
    fn own_blocks(&self) -> Tensor {
        self.laid_out(self.values(self.rank(), &self.blocks()))
    }

    fn blocks(&self) -> Vec<i64> {
        std::iter::once(self.ranks() as i64).chain(self.shape.iter().copied()).collect()
    }

    /// What all ranks' tensors of this shape make together.
    fn reduced(&self, shape: &[i64], op: ReduceOp) -> Tensor {
        let all = self.stacked(shape);
        let sum = all.to_kind(Kind::Double).sum_dim_intlist([0i64].as_slice(), false, Kind::Double);
        let result = match op {
            ReduceOp::Sum => sum,
            ReduceOp::Avg if is_floating(self.kind) => sum / self.ranks() as f64,
            ReduceOp::Avg => (sum / self.ranks() as f64).trunc(),
            ReduceOp::Product => {
                let product =
                    |product: Tensor, rank| product * all.get(rank as i64).to_kind(Kind::Double);
                (0..self.ranks()).fold(sum.ones_like(), product)
            }
            ReduceOp::Min => all.amin([0i64].as_slice(), false),
            ReduceOp::Max => all.amax([0i64].as_slice(), false),
        };
        result.to_kind(self.kind)
    }

    fn equal(&self, operation: &str, actual: &Tensor, expected: &Tensor) -> Result<()> {
        ensure!(actual.kind() == expected.kind(), "{operation}: {:?}", actual.kind());
        ensure!(actual.size() == expected.size(), "{operation}: {:?}", actual.size());
        // Averages of three are rounded, perhaps otherwise than here.
        let precision = match self.kind {
            Kind::Double => 1e-14,
            Kind::Float => 1e-6,
            Kind::Half => 1e-3,
            Kind::BFloat16 => 1e-2,
            _ => 0.0,
        };
        let (actual, expected) = (actual.to_kind(Kind::Double), expected.to_kind(Kind::Double));
        let close = actual.allclose(&expected, precision, 0.0, false);
        ensure!(close, "{operation}: {actual} instead of {expected}");
        Ok(())
    }

    fn reductions(&self, op: ReduceOp) -> Result<()> {
        let (group, mut own) = (self.group, self.own());
        let all_reduced = match self.form {
            Form::Blocking => group.all_reduce_tensor(&mut own, op).map(|()| own)?,
            Form::Async => group.all_reduce_tensor_async(own, op)?.wait()?,
            Form::Differentiable => functional::all_reduce(group, &own, op)?,
        };
        self.equal("all_reduce", &all_reduced, &self.reduced(&self.shape, op))?;

        for root in 0..self.ranks() {
            let mut own = self.own();
            let reduced = match self.form {
                Form::Blocking => group.reduce_tensor(&mut own, op, root).map(|()| own)?,
                Form::Async => group.reduce_tensor_async(own, op, root)?.wait()?,
                Form::Differentiable => functional::reduce(group, &own, op, root)?,
            };
            let expected = match self.form {
                _ if root == self.rank() => self.reduced(&self.shape, op),
                Form::Differentiable => self.own().zeros_like(),
                _ => self.own(),
            };
            self.equal("reduce", &reduced, &expected)?;
        }

        let own = self.own_blocks();
        let part = match self.form {
            Form::Blocking => group.reduce_scatter_tensor(&own, op)?,
            Form::Async => group.reduce_scatter_tensor_async(own, op)?.wait()?,
            Form::Differentiable => functional::reduce_scatter(group, &own, op)?,
        };
        let whole = self.reduced(&self.blocks(), op);
        self.equal("reduce_scatter", &part, &whole.get(self.rank() as i64))?;

        let counts = self.counts();
        let shape = self.rows(counts.iter().sum());
        let own = self.laid_out(self.values(self.rank(), &shape));
        let part = match self.form {
            Form::Blocking => group.reduce_scatter_v_tensor(&own, &counts, op)?,
            Form::Async => group.reduce_scatter_v_tensor_async(own, &counts, op)?.wait()?,
            Form::Differentiable => functional::reduce_scatter_v(group, &own, &counts, op)?,
        };
        let expected = block(&self.reduced(&shape, op), &counts, self.rank());
        self.equal("reduce_scatter_v", &part, &expected)
    }

    /// How many rows each rank has: some none.
    fn counts(&self) -> Vec<usize> {
        (0..self.ranks()).map(|rank| (rank + 1) % 3 * self.shape[0] as usize).collect()
    }

    /// The shape of so many rows.
    fn rows(&self, count: usize) -> Vec<i64> {
        std::iter::once(count as i64).chain(self.shape[1..].iter().copied()).collect()
    }

    fn uneven(&self) -> Result<()> {
        let (group, counts) = (self.group, self.counts());
        let of = |rank: usize| self.values(rank, &self.rows(counts[rank]));
        let own = self.laid_out(of(self.rank()));
        let gathered = match self.form {
            Form::Blocking => group.all_gather_v_tensor(&own, &counts)?,
            Form::Async => group.all_gather_v_tensor_async(own, &counts)?.wait()?,
            Form::Differentiable => functional::all_gather_v(group, &own, &counts)?,
        };
        let all: Vec<Tensor> = (0..self.ranks()).map(of).collect();
        self.equal("all_gather_v", &gathered, &Tensor::cat(&all, 0))?;

        // Other numbers of rows from each rank to each.
        let sent = |from: usize| -> Vec<usize> {
            (0..self.ranks()).map(|to| (from + 2 * to) % 3 * self.shape[0] as usize).collect()
        };
        let of = |rank: usize| self.values(rank, &self.rows(sent(rank).iter().sum()));
        let (own, input) = (self.laid_out(of(self.rank())), sent(self.rank()));
        let output: Vec<usize> = (0..self.ranks()).map(|from| sent(from)[self.rank()]).collect();
        let received = match self.form {
            Form::Blocking => group.all_to_all_v_tensor(&own, &input, &output)?,
            Form::Async => group.all_to_all_v_tensor_async(own, &input, &output)?.wait()?,
            Form::Differentiable => functional::all_to_all_v(group, &own, &input, &output)?,
        };
        let blocks = (0..self.ranks()).map(|from| block(&of(from), &sent(from), self.rank()));
        self.equal("all_to_all_v", &received, &Tensor::cat(&blocks.collect::<Vec<_>>(), 0))
    }

    /// Each rank sends two messages to each other, and lists them before those that it receives.
    fn batches(&self) -> Result<()> {
        let shapes = [self.shape.clone(), self.blocks()];
        let peers = || (0..self.ranks()).filter(|&peer| peer != self.rank());
        let messages = || peers().flat_map(|peer| shapes.iter().map(move |shape| (peer, shape)));
        let send = |(to, shape): (usize, &Vec<i64>)| P2pOp::Send {
            data: self.laid_out(self.values(self.rank(), shape)),
            to,
        };
        let recv = |(from, shape): (usize, &Vec<i64>)| P2pOp::Recv {
            buffer: self.laid_out(self.values(from, shape).zeros_like()),
            from,
        };
        let mut ops: Vec<P2pOp<Tensor>> =
            messages().map(send).chain(messages().map(recv)).collect();
        let tensor = |op: P2pOp<Tensor>| match op {
            P2pOp::Send { data, .. } => data,
            P2pOp::Recv { buffer, .. } => buffer,
        };
        let group = self.group;
        let tensors: Vec<Tensor> = match self.form {
            Form::Blocking => {
                group.batch_send_recv_tensors(&mut ops)?;
                ops.into_iter().map(tensor).collect()
            }
            Form::Async => group.batch_send_recv_tensors_async(ops)?.wait()?,
            Form::Differentiable => {
                let borrowed = ops.iter().map(|op| match op {
                    P2pOp::Send { data, to } => P2pOp::Send { data, to: *to },
                    P2pOp::Recv { buffer, from } => P2pOp::Recv { buffer, from: *from },
                });
                functional::batch_send_recv(group, &borrowed.collect::<Vec<_>>())?
            }
        };
        let received = &tensors[messages().count()..];
        for ((from, shape), received) in messages().zip(received) {
            self.equal("batch_send_recv", received, &self.values(from, shape))?;
        }
        Ok(())
    }

    fn gathers(&self) -> Result<()> {
        let (group, own) = (self.group, self.own());
        let gathered = match self.form {
            Form::Blocking => group.all_gather_tensor(&own)?,
            Form::Async => group.all_gather_tensor_async(own)?.wait()?,
            Form::Differentiable => functional::all_gather(group, &own)?,
        };
        self.equal("all_gather", &gathered, &self.stacked(&self.shape))
    }

    fn rooted(&self, root: usize) -> Result<()> {
        let (group, is_root) = (self.group, self.rank() == root);
        let mut own = self.own();
        let copied = match self.form {
            Form::Blocking => group.broadcast_tensor(&mut own, root).map(|()| own)?,
            Form::Async => group.broadcast_tensor_async(own, root)?.wait()?,
            Form::Differentiable => functional::broadcast(group, &own, root)?,
        };
        self.equal("broadcast", &copied, &self.values(root, &self.shape))?;

        let own = self.own();
        let gathered = match self.form {
            Form::Blocking => group.gather_tensor(&own, root)?,
            Form::Async => group.gather_tensor_async(own, root)?.wait()?,
            Form::Differentiable => Some(functional::gather(group, &own, root)?),
        };
        match gathered {
            Some(gathered) if is_root => {
                self.equal("gather", &gathered, &self.stacked(&self.shape))?;
            }
            Some(empty) => ensure!(empty.size()[0] == 0, "not the root: {empty}"),
            None => ensure!(!is_root, "the root got nothing"),
        }

        let (blocks, mut output) = (self.own_blocks(), self.own());
        let input = is_root.then_some(&blocks);
        let scattered = match self.form {
            Form::Blocking => group.scatter_tensor(input, &mut output, root).map(|()| output)?,
            Form::Async => {
                let input = input.map(Tensor::shallow_clone);
                group.scatter_tensor_async(input, output, root)?.wait()?
            }
            Form::Differentiable => functional::scatter(group, &blocks, root)?,
        };
        let whole = self.values(root, &self.blocks());
        self.equal("scatter", &scattered, &whole.get(self.rank() as i64))
    }

    fn all_to_all(&self) -> Result<()> {
        let (group, own) = (self.group, self.own_blocks());
        let received = match self.form {
            Form::Blocking => group.all_to_all_tensor(&own)?,
            Form::Async => group.all_to_all_tensor_async(own)?.wait()?,
            Form::Differentiable => functional::all_to_all(group, &own)?,
        };
        let blocks = self.blocks();
        let of = |rank| self.values(rank, &blocks).get(self.rank() as i64);
        let expected: Vec<Tensor> = (0..self.ranks()).map(of).collect();
        self.equal("all_to_all", &received, &Tensor::stack(&expected, 0))
    }

    /// Each rank sends to the next.
    fn messages(&self) -> Result<()> {
        let (group, ranks) = (self.group, self.ranks());
        let (next, previous) = ((self.rank() + 1) % ranks, (self.rank() + ranks - 1) % ranks);
        let send = || -> Result<()> {
            match self.form {
                Form::Blocking => group.send_tensor(&self.own(), next)?,
                Form::Async => drop(group.send_tensor_async(self.own(), next)?.wait()?),
                Form::Differentiable => drop(functional::send(group, &self.own(), next)?),
            }
            Ok(())
        };
        let recv = || -> Result<Tensor> {
            let mut place = self.own().zeros_like();
            Ok(match self.form {
                Form::Blocking => group.recv_tensor(&mut place, previous).map(|()| place)?,
                Form::Async => group.recv_tensor_async(place, previous)?.wait()?,
                Form::Differentiable => {
                    functional::recv(group, &self.shape, self.kind, group.device(), previous)?
                }
            })
        };
        // No rank sends before it receives if the next one does so too.
        let received = if self.rank().is_multiple_of(2) {
            send()?;
            recv()?
        } else {
            let received = recv()?;
            send()?;
            received
        };
        self.equal("recv", &received, &self.values(previous, &self.shape))
    }
}

fn is_floating(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16)
}

/// Rank `rank`'s block of rows.
fn block(whole: &Tensor, counts: &[usize], rank: usize) -> Tensor {
    let start: usize = counts[..rank].iter().sum();
    whole.narrow(0, start as i64, counts[rank] as i64)
}
