//! Process groups on the host, in shared memory, in ordinary memory, and in both.

use std::ops::{Deref, DerefMut};

use anyhow::Result;
use flow_comm::{Buffer, DType, P2pOp, ProcessGroup, ReduceOp, SharedBuffer, digest};
use rustix::system::uname;

use super::backend::Backend;
use super::reference::{Number, Values};

/// Where a rank's buffers lie.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    Shared,
    Ordinary,
    /// Shared on some ranks, ordinary on others.
    Mixed,
}

pub struct Host<'a> {
    pub group: &'a ProcessGroup,
    place: Place,
    nodes: Vec<u32>,
}

impl<'a> Host<'a> {
    pub fn new(group: &'a ProcessGroup, place: Place) -> Result<Self> {
        // What says on which node a rank is, for those that mpirun starts by their hosts too.
        let own = (std::env::var("GROUP_RANK").ok(), uname().nodename().to_owned());
        let mut names = vec![0_i64; group.world_size()];
        group.all_gather(&[digest(&own) as i64], &mut names)?;
        let node = |name| names.iter().position(|other| other == name).unwrap_or_default() as u32;
        Ok(Self { group, place, nodes: names.iter().map(node).collect() })
    }

    /// Memory of a rank; `flip` swaps who has shared memory where it is mixed.
    pub fn memory<T: Number>(&self, content: Vec<T>, flip: usize) -> Result<Memory<T>> {
        let shared = match self.place {
            Place::Shared => true,
            Place::Ordinary => false,
            Place::Mixed => (self.group.rank() + flip).is_multiple_of(2),
        };
        if !shared {
            return Ok(Memory::Ordinary(content));
        }
        let mut buffer = self.group.alloc_shared(content.len())?;
        buffer.copy_from_slice(&content);
        Ok(Memory::Shared(buffer))
    }
}

#[derive(Debug)]
pub enum Memory<T: Number> {
    Shared(SharedBuffer<T>),
    Ordinary(Vec<T>),
}

impl<T: Number> Deref for Memory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Shared(buffer) => buffer,
            Self::Ordinary(buffer) => buffer,
        }
    }
}

impl<T: Number> DerefMut for Memory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Shared(buffer) => buffer,
            Self::Ordinary(buffer) => buffer,
        }
    }
}

impl<T: Number> Buffer for Memory<T> {
    fn dtype(&self) -> DType {
        T::DTYPE
    }

    fn bytes(&self) -> &[u8] {
        (**self).bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        (**self).bytes_mut()
    }
}

impl Backend for Host<'_> {
    type Memory<T: Number> = Memory<T>;
    const VALUES: Values = Values::Any;

    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn nodes(&self) -> &[u32] {
        &self.nodes
    }

    fn reduces(&self, _: DType, _: ReduceOp) -> bool {
        true
    }

    fn input<T: Number>(&self, content: Vec<T>) -> Result<Memory<T>> {
        self.memory(content, 0)
    }

    fn output<T: Number>(&self, len: usize) -> Result<Memory<T>> {
        self.memory(vec![T::small(9); len], 1)
    }

    fn read<T: Number>(&self, memory: &Memory<T>) -> Result<Vec<T>> {
        Ok(memory.to_vec())
    }

    fn broadcast<T: Number>(&self, data: &mut Memory<T>, root: usize) -> Result<()> {
        Ok(self.group.broadcast(data, root)?)
    }

    fn send<T: Number>(&self, data: &Memory<T>, to: usize) -> Result<()> {
        Ok(self.group.send(data, to)?)
    }

    fn recv<T: Number>(&self, data: &mut Memory<T>, from: usize) -> Result<()> {
        Ok(self.group.recv(data, from)?)
    }

    fn batch_send_recv<T: Number>(
        &self,
        sends: &mut [(usize, Memory<T>)],
        receives: &mut [(usize, Memory<T>)],
    ) -> Result<()> {
        let sends = sends.iter_mut().map(|(to, data)| P2pOp::Send { data: &mut **data, to: *to });
        let receives = receives
            .iter_mut()
            .map(|(from, data)| P2pOp::Recv { buffer: &mut **data, from: *from });
        let mut ops: Vec<P2pOp<&mut [T]>> = sends.chain(receives).collect();
        Ok(self.group.batch_send_recv(&mut ops)?)
    }
}
