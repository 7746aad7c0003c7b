//! The table: every collective, as each back-end has it, in all types and reductions, against plain
//! references. A new one is a line, and a method of [`Case`] that checks it.

use anyhow::{Result, ensure};
use flow_comm::{DType, ReduceOp, bf16, f16};

use super::backend::Backend;
use super::host::Host;
use super::nccl::OnGpu;
use super::reference::{MAX_RANKS, Number};

/// Blocks of more elements are long.
const LONG: usize = 1000;

type Check<'a, B, T> = fn(&Case<'a, B, T>) -> Result<()>;

/// Declares each collective as a method of every back-end, and lists what checks it. A group on GPUs
/// takes a stream after the other arguments.
macro_rules! collectives {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        pub trait Collectives: Backend {
            $(fn $name<T: Number>(&self, $($argument: $type),*) -> Result<()>;)*
        }

        impl Collectives for Host<'_> {
            $(fn $name<T: Number>(&self, $($argument: $type),*) -> Result<()> {
                Ok(self.group.$name($($argument),*)?)
            })*
        }

        impl Collectives for OnGpu {
            $(fn $name<T: Number>(&self, $($argument: $type),*) -> Result<()> {
                Ok(self.nccl.$name($($argument,)* &self.gpu.stream)?)
            })*
        }

        /// Lists what checks each collective of the table, by its name.
        fn checks<'a, B: Collectives, T: Number>() -> Vec<(&'static str, Check<'a, B, T>)> {
            vec![$((stringify!($name), Case::$name),)*]
        }
    };
}

collectives! {
    all_reduce(data: &mut Self::Memory<T>, op: ReduceOp);
    reduce(data: &mut Self::Memory<T>, op: ReduceOp, root: usize);
    all_gather(input: &Self::Memory<T>, output: &mut Self::Memory<T>);
    all_gather_v(input: &Self::Memory<T>, output: &mut Self::Memory<T>, counts: &[usize]);
    reduce_scatter(input: &Self::Memory<T>, output: &mut Self::Memory<T>, op: ReduceOp);
    reduce_scatter_v(
        input: &Self::Memory<T>, output: &mut Self::Memory<T>, counts: &[usize], op: ReduceOp
    );
    gather(input: &Self::Memory<T>, output: Option<&mut Self::Memory<T>>, root: usize);
    scatter(input: Option<&Self::Memory<T>>, output: &mut Self::Memory<T>, root: usize);
    all_to_all(input: &Self::Memory<T>, output: &mut Self::Memory<T>);
    all_to_all_v(
        input: &Self::Memory<T>, input_counts: &[usize],
        output: &mut Self::Memory<T>, output_counts: &[usize]
    );
}

/// Lists checks of what each back-end does by itself.
fn checks_of_backends<'a, B: Collectives, T: Number>() -> [(&'static str, Check<'a, B, T>); 3] {
    [
        ("broadcast", Case::broadcast),
        ("send_recv", Case::send_recv),
        ("batch_send_recv", Case::batch_send_recv),
    ]
}

/// Checks all collectives in all types.
pub fn check_types<B: Collectives>(
    backend: &B,
    counts: impl Fn(DType) -> Vec<usize>,
) -> Result<()> {
    check_type::<B, f32>(backend, &counts(DType::F32))?;
    check_type::<B, f64>(backend, &counts(DType::F64))?;
    check_type::<B, f16>(backend, &counts(DType::F16))?;
    check_type::<B, bf16>(backend, &counts(DType::BF16))?;
    check_type::<B, i32>(backend, &counts(DType::I32))?;
    check_type::<B, i64>(backend, &counts(DType::I64))?;
    check_type::<B, u8>(backend, &counts(DType::U8))
}

/// Checks all collectives in one type, with blocks of these lengths.
pub fn check_type<B: Collectives, T: Number>(backend: &B, counts: &[usize]) -> Result<()> {
    let size = backend.nodes().len();
    ensure!(size <= MAX_RANKS, "at most {MAX_RANKS} ranks can be checked");
    for (number, &count) in counts.iter().enumerate() {
        for (name, check) in checks::<B, T>().into_iter().chain(checks_of_backends()) {
            check(&Case {
                backend,
                name,
                count,
                root: (number + 1) % size,
                _type: Default::default(),
            })?;
        }
    }
    Ok(())
}

/// One collective on blocks of one length.
struct Case<'a, B, T> {
    backend: &'a B,
    name: &'static str,
    count: usize,
    /// A rank that differs from length to length.
    root: usize,
    _type: std::marker::PhantomData<T>,
}

impl<B: Collectives, T: Number> Case<'_, B, T> {
    fn size(&self) -> usize {
        self.backend.nodes().len()
    }

    /// What `rank` gives as element `index`.
    fn value(&self, rank: usize, index: usize) -> T {
        B::VALUES.of(rank, index)
    }

    fn own(&self, len: usize) -> Result<B::Memory<T>> {
        let rank = self.backend.rank();
        self.backend.input((0..len).map(|index| self.value(rank, index)).collect())
    }

    /// All that the back-end has; of long blocks a sum and an average, as others travel as sums do.
    fn reductions(&self) -> impl Iterator<Item = ReduceOp> + '_ {
        let all = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max];
        let tried = if self.count > LONG { 2 } else { all.len() };
        all.into_iter().take(tried).filter(|&op| self.backend.reduces(T::DTYPE, op))
    }

    fn expect(&self, found: &B::Memory<T>, expected: impl Fn(usize) -> T) -> Result<()> {
        let found = self.backend.read(found)?;
        let wrong = found.iter().enumerate().find(|&(i, &got)| !B::VALUES.is(got, expected(i)));
        if let Some((index, got)) = wrong {
            let (Self { name, count, root, .. }, rank) = (self, self.backend.rank());
            anyhow::bail!(
                "{name} of {count} x {}, root {root}, rank {rank} of {}: element {index} is \
                 {got:?} and not {:?}",
                T::DTYPE,
                self.size(),
                expected(index)
            );
        }
        Ok(())
    }

    fn all_reduce(&self) -> Result<()> {
        for op in self.reductions() {
            let mut data = self.own(self.count)?;
            self.backend.all_reduce(&mut data, op)?;
            let nodes = self.backend.nodes();
            self.expect(&data, |index| B::VALUES.all_reduced(op, nodes, self.count, index))?;
        }
        Ok(())
    }

    fn reduce(&self) -> Result<()> {
        let rank = self.backend.rank();
        for op in self.reductions() {
            let mut data = self.own(self.count)?;
            self.backend.reduce(&mut data, op, self.root)?;
            self.expect(&data, |index| {
                if rank == self.root {
                    B::VALUES.reduced(op, self.size(), index)
                } else {
                    self.value(rank, index)
                }
            })?;
        }
        Ok(())
    }

    fn broadcast(&self) -> Result<()> {
        let mut data = self.own(self.count)?;
        self.backend.broadcast(&mut data, self.root)?;
        self.expect(&data, |index| self.value(self.root, index))
    }

    fn all_gather(&self) -> Result<()> {
        let input = self.own(self.count)?;
        let mut output = self.backend.output(self.size() * self.count)?;
        self.backend.all_gather(&input, &mut output)?;
        self.expect(&output, |index| self.value(index / self.count, index % self.count))
    }

    fn reduce_scatter(&self) -> Result<()> {
        let rank = self.backend.rank();
        let size = self.size();
        let count = self.count;
        for op in self.reductions() {
            let input = self.own(size * count)?;
            let mut output = self.backend.output(count)?;
            self.backend.reduce_scatter(&input, &mut output, op)?;
            self.expect(&output, |index| B::VALUES.reduced(op, size, rank * count + index))?;
            self.expect(&input, |index| self.value(rank, index))?;
        }
        Ok(())
    }

    fn gather(&self) -> Result<()> {
        let is_root = self.backend.rank() == self.root;
        let input = self.own(self.count)?;
        let mut output =
            is_root.then(|| self.backend.output(self.size() * self.count)).transpose()?;
        self.backend.gather(&input, output.as_mut(), self.root)?;
        let Some(output) = output else { return Ok(()) };
        self.expect(&output, |index| self.value(index / self.count, index % self.count))
    }

    fn scatter(&self) -> Result<()> {
        let rank = self.backend.rank();
        let input = (rank == self.root).then(|| self.own(self.size() * self.count)).transpose()?;
        let mut output = self.backend.output(self.count)?;
        self.backend.scatter(input.as_ref(), &mut output, self.root)?;
        self.expect(&output, |index| self.value(self.root, rank * self.count + index))
    }

    fn all_to_all(&self) -> Result<()> {
        let rank = self.backend.rank();
        let count = self.count;
        let len = self.size() * count;
        let input = self.own(len)?;
        let mut output = self.backend.output(len)?;
        self.backend.all_to_all(&input, &mut output)?;
        self.expect(&output, |index| self.value(index / count, rank * count + index % count))
    }

    /// A count that differs from block to block: none, a part or all of this case's.
    fn uneven_count(&self, block: usize) -> usize {
        match (block + self.root) % 3 {
            0 => 0,
            1 => self.count,
            _ => self.count / 2 + 1,
        }
    }

    fn uneven_counts(&self) -> Vec<usize> {
        (0..self.size()).map(|rank| self.uneven_count(rank)).collect()
    }

    fn all_gather_v(&self) -> Result<()> {
        let counts = self.uneven_counts();
        let input = self.own(counts[self.backend.rank()])?;
        let mut output = self.backend.output(counts.iter().sum())?;
        self.backend.all_gather_v(&input, &mut output, &counts)?;
        self.expect(&output, |index| {
            let (from, index) = block_of(&counts, index);
            self.value(from, index)
        })
    }

    fn reduce_scatter_v(&self) -> Result<()> {
        let rank = self.backend.rank();
        let counts = self.uneven_counts();
        let start: usize = counts[..rank].iter().sum();
        for op in self.reductions() {
            let input = self.own(counts.iter().sum())?;
            let mut output = self.backend.output(counts[rank])?;
            self.backend.reduce_scatter_v(&input, &mut output, &counts, op)?;
            self.expect(&output, |index| B::VALUES.reduced(op, self.size(), start + index))?;
            self.expect(&input, |index| self.value(rank, index))?;
        }
        Ok(())
    }

    fn all_to_all_v(&self) -> Result<()> {
        let rank = self.backend.rank();
        let size = self.size();
        let sent = |from: usize| -> Vec<usize> {
            (0..size).map(|to| self.uneven_count(from * size + to + from)).collect()
        };
        let received: Vec<usize> = (0..size).map(|from| sent(from)[rank]).collect();
        let input = self.own(sent(rank).iter().sum())?;
        let mut output = self.backend.output(received.iter().sum())?;
        self.backend.all_to_all_v(&input, &sent(rank), &mut output, &received)?;
        self.expect(&output, |index| {
            let (from, index) = block_of(&received, index);
            self.value(from, sent(from)[..rank].iter().sum::<usize>() + index)
        })
    }

    /// Between all pairs, one after the other.
    fn send_recv(&self) -> Result<()> {
        let rank = self.backend.rank();
        let data = self.own(self.count)?;
        for from in 0..self.size() {
            for to in (0..self.size()).filter(|&to| to != from) {
                if rank == from {
                    self.backend.send(&data, to)?;
                } else if rank == to {
                    let mut received = self.backend.output(self.count)?;
                    self.backend.recv(&mut received, from)?;
                    self.expect(&received, |index| self.value(from, index))?;
                }
            }
        }
        Ok(())
    }

    /// Each rank sends to all others and receives from all.
    fn batch_send_recv(&self) -> Result<()> {
        let rank = self.backend.rank();
        let size = self.size();
        if size == 1 {
            return Ok(());
        }
        let others = || (0..size).filter(|&other| other != rank);
        let count = |from: usize, to: usize| self.count + (from + to) % 2;
        let mut sends =
            others().map(|to| Ok((to, self.own(count(rank, to))?))).collect::<Result<Vec<_>>>()?;
        let mut receives = others()
            .map(|from| Ok((from, self.backend.output(count(from, rank))?)))
            .collect::<Result<Vec<_>>>()?;
        self.backend.batch_send_recv(&mut sends, &mut receives)?;
        receives
            .iter()
            .try_for_each(|(from, data)| self.expect(data, |index| self.value(*from, index)))
    }
}

/// Which of several blocks in a row has an element, and at which position.
fn block_of(counts: &[usize], mut index: usize) -> (usize, usize) {
    for (block, &count) in counts.iter().enumerate() {
        if index < count {
            return (block, index);
        }
        index -= count;
    }
    unreachable!("the index is in one of the blocks")
}
