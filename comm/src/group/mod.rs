//! Process groups: the ranks that take part in collectives together.

mod arena_handle;
mod arguments;
mod batch;
mod buckets;
pub mod core;
mod cuda;
mod in_process;
mod lane;
mod members;
mod mesh;
mod nccl;
mod nonblocking;
mod parts;
mod peers;
mod reports;
mod split;
#[cfg(test)]
mod toy_backend;
mod uneven;

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use flow_kernels::{DType, Element, ReduceOp};
use flow_store::fork::ForkSafe;

use crate::arguments::Caller;
use crate::backend::{BufferView, Buffers};
use crate::buffer::{Buffer, SharedBuffer};
use crate::descriptor::{MessageDescriptor, OpDescriptor};
use crate::env::Membership;
use crate::error::{Error, Result};
use crate::failure::Failure;
use crate::kind::Kind;
use crate::label::Label;
use crate::settings;
use crate::trace::Record;
use crate::world::World;

use self::core::GroupCore;
pub use arena_handle::ArenaHandle;
use cuda::Cuda;
pub use lane::Lane;
use lane::Workers;
pub use mesh::{Axis, Mesh};
use parts::Parts;
pub use peers::Peers;

/// How long ranks wait for each other unless `FLOW_TIMEOUT` (in seconds) or
/// [`ProcessGroup::set_timeout`] says otherwise: as long as PyTorch's CPU groups do.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(1800);
/// Longer timeouts mean this: a year.
const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// A group of ranks, and this process' place in it.
///
/// Every rank of a group calls the same collectives in the same order with the same sizes and
/// types; the group checks that they do. Results of reductions are the same bits on all ranks:
/// operands are taken in rank order. An error makes the group unusable on all ranks; sub-groups and
/// the group they came from fail apart.
///
/// Clones are the same group. Dropping the last one waits for asynchronous operations that are
/// still under way.
///
/// A process that is forked from a rank (and is not replaced by another program) is not a member of
/// the rank's groups: all operations on them fail there at once, and dropping them does nothing. It
/// may join as a rank of its own.
#[derive(Clone)]
pub struct ProcessGroup {
    inner: Arc<ForkSafe<Inner>>,
    /// What else all ranks must agree on in collectives on the host.
    layout: u64,
    /// What the program calls operations on the host, if not as they are called here.
    label: Option<Label>,
    /// How long operations on the host wait, if not as long as the group says.
    timeout: Option<Duration>,
}

/// Clones are equal, and nothing else is.
impl PartialEq for ProcessGroup {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for ProcessGroup {}

struct Inner {
    // Before the parts: their threads must end first.
    workers: Workers,
    cuda: Mutex<Cuda>,
    parts: Parts,
    local_rank: usize,
}

impl ProcessGroup {
    /// The group of all ranks of the job, as the environment says: flow-launch's or torchrun's
    /// variables (RANK, WORLD_SIZE, ...), OpenMPI's, or Slurm's; without any, a group of this
    /// process alone.
    ///
    /// Waits for all ranks. All ranks must call it equally often (see
    /// [`ProcessGroup::join_named`]). Errors: a contradiction in the variables, ranks that do not
    /// come.
    pub fn from_env() -> Result<Self> {
        let membership = Membership::from_env()?;
        let timeout = timeout_from_env(membership.rank)?;
        Self::join(&membership, timeout)
    }

    /// As [`ProcessGroup::from_env`], with the place in the job and the timeout given.
    pub fn join(membership: &Membership, timeout: Duration) -> Result<Self> {
        Self::join_named(membership, "", timeout)
    }

    /// As [`ProcessGroup::join`], with those ranks that join under the same name: what else they
    /// have joined, or not, does not matter. Under one name all of them must join equally often.
    /// [`ProcessGroup::join`] is to join without a name, that is under an empty one. Where MPI
    /// gives the rendezvous, all ranks of the job join in the same order, whatever the names.
    ///
    /// Processes that the ranks have forked join apart from these. If each rank forks several, each
    /// set of them, one of each rank, needs a name of its own.
    pub fn join_named(membership: &Membership, name: &str, timeout: Duration) -> Result<Self> {
        let timeout = timeout.min(MAX_TIMEOUT);
        let world = Arc::new(World::join(membership, name, timeout)?);
        world.join_trace();
        Ok(Self::of(Parts::of_world(world, timeout)?, membership.local_rank, Cuda::default()))
    }

    fn of(parts: Parts, local_rank: usize, cuda: Cuda) -> Self {
        let (workers, cuda) = (Workers::default(), Mutex::new(cuda));
        let inner = Arc::new(ForkSafe::new(Inner { workers, cuda, parts, local_rank }));
        Self { inner, layout: 0, label: None, timeout: None }
    }

    /// This process' number in the group.
    pub fn rank(&self) -> usize {
        self.core().rank
    }

    /// Number of processes in the group.
    pub fn world_size(&self) -> usize {
        self.core().size()
    }

    /// How many members of the group are on this node, this process among them.
    pub fn local_world_size(&self) -> usize {
        self.core().locals.len()
    }

    /// How many ranks of the job are on this node, whether in the group or not: they share its
    /// cores.
    pub fn ranks_on_node(&self) -> usize {
        self.core().world.locals.len()
    }

    /// How many collectives this rank has begun in the group on the host.
    pub fn sequence(&self) -> u64 {
        self.core().sequence.load(Ordering::Relaxed)
    }

    /// This process' number among those of the job on this machine: which of its devices to use.
    pub fn local_rank(&self) -> usize {
        self.inner.local_rank
    }

    /// The members' ranks in the job, by their rank in this group.
    pub fn ranks(&self) -> &[usize] {
        &self.core().ranks
    }

    /// How long this rank waits for others before the group fails.
    pub fn timeout(&self) -> Duration {
        self.timeout.unwrap_or_else(|| self.core().timeout())
    }

    /// The group's last operations on this rank, the oldest first, with those that are under way:
    /// on the host and on GPUs, some hundred of them. Recording is always on.
    pub fn flight_recorder(&self) -> Vec<Record> {
        self.core().recorder.records()
    }

    /// This group, for blocking collectives on the host of which all ranks must agree on a digest too:
    /// what they are part of.
    pub fn with_layout(&self, layout: u64) -> Self {
        Self { layout, ..self.clone() }
    }

    /// This group, for blocking operations on the host that a program calls something else: see
    /// [`Label`].
    pub fn with_label(&self, label: Label) -> Self {
        Self { label: Some(label), ..self.clone() }
    }

    /// This group, whose operations on the host wait so long when they are called on this handle:
    /// a timeout of their own. Groups made from it start with that.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # let group = flow_comm::ProcessGroup::from_env()?; // alone: a group of one
    /// group.with_timeout(Duration::from_secs(5)).barrier()?;
    /// # Ok::<(), flow_comm::Error>(())
    /// ```
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout.min(MAX_TIMEOUT)), ..self.clone() }
    }

    /// Changes how long this rank waits; groups made from this one start with the new value.
    pub fn set_timeout(&self, timeout: Duration) {
        self.core().set_timeout(timeout.min(MAX_TIMEOUT));
    }

    /// A group of the same ranks with collectives of its own, which do not mix with this one's.
    pub fn duplicate(&self) -> Result<Self> {
        let all: Vec<usize> = (0..self.world_size()).collect();
        self.new_group(&all)?
            .ok_or_else(|| self.system("duplicate", "this rank is not a member".into()))
    }

    /// `len` zeros in memory that collectives use in place.
    pub fn alloc_shared<T: Element>(&self, len: usize) -> Result<SharedBuffer<T>> {
        let full = || {
            self.system(
                "alloc_shared",
                format!("no room for {len} x {} in this rank's region", T::DTYPE),
            )
        };
        SharedBuffer::new(&self.member(&"alloc_shared")?.core.world.arena, len).ok_or_else(full)
    }

    /// Reduces `buffer` element by element over all ranks; all get the result.
    pub fn all_reduce<B: Buffer + ?Sized>(&self, buffer: &mut B, op: ReduceOp) -> Result<()> {
        let (data, dtype) = self.raw_mut("all_reduce", buffer)?;
        let operation = OpDescriptor::new(Kind::AllReduce, dtype, data.bytes / dtype.size());
        self.collective(operation.reduce(op), Buffers::in_place(data))
    }

    /// As [`ProcessGroup::all_reduce`]; only rank `root` gets the result, the other buffers stay as
    /// they are.
    pub fn reduce<B: Buffer + ?Sized>(
        &self,
        buffer: &mut B,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        self.caller().check_rank("reduce", "root", root)?;
        let (data, dtype) = self.raw_mut("reduce", buffer)?;
        let operation = OpDescriptor::new(Kind::Reduce, dtype, data.bytes / dtype.size());
        self.collective(operation.reduce(op).root(root), Buffers::in_place(data))
    }

    /// Copies rank `root`'s `buffer` to all ranks'.
    pub fn broadcast<B: Buffer + ?Sized>(&self, buffer: &mut B, root: usize) -> Result<()> {
        self.caller().check_rank("broadcast", "root", root)?;
        let (data, dtype) = self.raw_mut("broadcast", buffer)?;
        let operation = OpDescriptor::new(Kind::Broadcast, dtype, data.bytes / dtype.size());
        self.collective(operation.root(root), Buffers::in_place(data))
    }

    /// All ranks' `input`, in rank order, to every rank's `output`, which is world size times as
    /// long.
    pub fn all_gather<I, O>(&self, input: &I, output: &mut O) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let (input, output, dtype) =
            self.pair("all_gather", input, output, (1, self.world_size()))?;
        let operation = OpDescriptor::new(Kind::AllGather, dtype, input.bytes / dtype.size());
        self.collective(operation, Buffers::new(input, output))
    }

    /// As [`ProcessGroup::all_gather`], to rank `root` only, which gives `Some` output; the others
    /// give `None`.
    pub fn gather<I, O>(&self, input: &I, output: Option<&mut O>, root: usize) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        self.caller().check_rank("gather", "root", root)?;
        self.caller().check_root_side("gather", "output", output.is_some(), root)?;
        let (input, output, dtype) = match output {
            Some(output) => self.pair("gather", input, output, (1, self.world_size()))?,
            None => {
                let (input, dtype) = self.raw("gather", input)?;
                (input, BufferView::NONE, dtype)
            }
        };
        let operation = OpDescriptor::new(Kind::Gather, dtype, input.bytes / dtype.size());
        self.collective(operation.root(root), Buffers::new(input, output))
    }

    /// Gives block r of rank `root`'s `input` (world size blocks, each as long as `output`) to rank
    /// r. The root gives `Some` input, the others `None`.
    pub fn scatter<I, O>(&self, input: Option<&I>, output: &mut O, root: usize) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        self.caller().check_rank("scatter", "root", root)?;
        self.caller().check_root_side("scatter", "input", input.is_some(), root)?;
        let (input, output, dtype) = match input {
            Some(input) => self.pair("scatter", input, output, (self.world_size(), 1))?,
            None => {
                let (output, dtype) = self.raw_mut("scatter", output)?;
                (BufferView::NONE, output, dtype)
            }
        };
        let operation = OpDescriptor::new(Kind::Scatter, dtype, output.bytes / dtype.size());
        self.collective(operation.root(root), Buffers::new(input, output))
    }

    /// Reduces `input` (world size blocks, each as long as `output`) over all ranks; rank r gets
    /// block r.
    pub fn reduce_scatter<I, O>(&self, input: &I, output: &mut O, op: ReduceOp) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let (input, output, dtype) =
            self.pair("reduce_scatter", input, output, (self.world_size(), 1))?;
        let operation = OpDescriptor::new(Kind::ReduceScatter, dtype, input.bytes / dtype.size());
        self.collective(operation.reduce(op), Buffers::new(input, output))
    }

    /// Block s of rank r's `output` becomes block r of rank s' `input`; both are world size equal
    /// blocks.
    pub fn all_to_all<I, O>(&self, input: &I, output: &mut O) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let (input, output, dtype) = self.pair("all_to_all", input, output, (1, 1))?;
        self.caller().check_blocks("all_to_all", input.bytes / dtype.size())?;
        let operation = OpDescriptor::new(Kind::AllToAll, dtype, input.bytes / dtype.size());
        self.collective(operation, Buffers::new(input, output))
    }

    /// Sends `data` to rank `to`, which calls [`ProcessGroup::recv`] with the same size and type.
    /// May return before it does. Messages between two ranks keep their order. The message has tag
    /// 0.
    pub fn send<B: Buffer + ?Sized>(&self, data: &B, to: usize) -> Result<()> {
        self.send_with_tag(data, to, 0)
    }

    /// Receives the next message with tag 0 of rank `from`.
    pub fn recv<B: Buffer + ?Sized>(&self, buffer: &mut B, from: usize) -> Result<()> {
        self.recv_with_tag(buffer, from, 0)
    }

    /// As [`ProcessGroup::send`], to be received by [`ProcessGroup::recv_with_tag`] or
    /// [`ProcessGroup::recv_any`] with the same tag.
    pub fn send_with_tag<B: Buffer + ?Sized>(&self, data: &B, to: usize, tag: u32) -> Result<()> {
        self.caller().check_peer("send", to)?;
        let (data, dtype) = self.raw("send", data)?;
        let message = self.message(Kind::Send, Some(to), (data, dtype), tag);
        self.run_in_order(Lane::To(to), |group| {
            group.begin_message(&message)?;
            group.backend.send(data, &message, to)
        })
    }

    /// Receives the next message of rank `from` with this tag, as MPI matches them: messages with
    /// the same tag keep their order, and those with other tags that come before are kept, in
    /// ordinary memory, until they are asked for. There is no limit to how much is kept but the
    /// memory of the machine.
    ///
    /// Several threads may receive from the same rank at once, with different tags.
    pub fn recv_with_tag<B: Buffer + ?Sized>(
        &self,
        buffer: &mut B,
        from: usize,
        tag: u32,
    ) -> Result<()> {
        self.caller().check_peer("recv", from)?;
        let (data, dtype) = self.raw_mut("recv", buffer)?;
        let message = self.message(Kind::Recv, Some(from), (data, dtype), tag);
        self.run_in_order(Lane::From(from, tag), |group| {
            group.begin_message(&message)?;
            group.backend.recv(data, &message, Some(from)).map(|_| ())
        })
    }

    /// As [`ProcessGroup::recv_with_tag`], from whichever rank has a message with this tag first.
    /// Returns that rank. If several have one, they are served in turn.
    ///
    /// A message that also fits a `recv_with_tag` of another thread, or an asynchronous one, goes
    /// to either of the two.
    ///
    /// # Errors
    ///
    /// Beside those of every receive: a rank has died, or all others have left the group, and none
    /// has left such a message behind. Over several nodes without flow-launch, only the first ranks
    /// of nodes see each other die; else a rank on another node that has died, or left, and has
    /// never sent this one anything, is missed when the time is over.
    pub fn recv_any<B: Buffer + ?Sized>(&self, buffer: &mut B, tag: u32) -> Result<usize> {
        if self.world_size() == 1 {
            return Err(self
                .caller()
                .argument("recv_any", "there is no other rank in the group".into()));
        }
        let (data, dtype) = self.raw_mut("recv_any", buffer)?;
        let message = self.message(Kind::Recv, None, (data, dtype), tag);
        self.run_in_order(Lane::FromAny(tag), |group| {
            group.begin_message(&message)?;
            group.backend.recv(data, &message, None)
        })
    }

    /// Returns when all ranks of the group have called it.
    pub fn barrier(&self) -> Result<()> {
        let operation = OpDescriptor::new(Kind::Barrier, DType::U8, 0);
        self.collective(operation, Buffers::new(BufferView::NONE, BufferView::NONE))
    }

    fn core(&self) -> &GroupCore {
        &self.inner.parts.core
    }

    fn failure(&self) -> &Failure {
        &self.inner.parts.failure
    }

    /// The group's parts, for an operation that takes the member itself, and not a process that was
    /// forked from it.
    fn member(&self, operation: &dyn fmt::Display) -> Result<&Parts> {
        match self.inner.is_ours() {
            true => Ok(&self.inner.parts),
            false => Err(self.core().world.forked(operation)),
        }
    }

    /// Runs a collective after the asynchronous ones that were started before it, and after the
    /// launched buckets.
    fn collective(&self, mut operation: OpDescriptor, buffers: Buffers) -> Result<()> {
        operation.layout = self.layout;
        operation.label = self.label;
        self.run_in_order(Lane::Collectives, |group| {
            group.finish_buckets()?;
            group.begin(&mut operation)?;
            group.backend.collective(operation, buffers)
        })
    }

    /// A message to or from a rank of the group, or from any.
    fn message(
        &self,
        kind: Kind,
        peer: Option<usize>,
        (data, dtype): (BufferView, DType),
        tag: u32,
    ) -> MessageDescriptor {
        let (peer, count) = (peer.map(|peer| self.ranks()[peer]), data.bytes / dtype.size());
        MessageDescriptor { kind, peer, count, dtype, tag, label: self.label }
    }

    fn caller(&self) -> Caller {
        self.core().caller()
    }

    fn system(&self, operation: &str, reason: String) -> Error {
        Error::System { rank: self.core().world.rank, operation: operation.into(), reason }
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProcessGroup(rank {} of {}, {:?})", self.rank(), self.world_size(), self.ranks())
    }
}

fn timeout_from_env(rank: usize) -> Result<Duration> {
    let failed = |reason| Error::Argument { rank, operation: "from_env".into(), reason };
    Ok(settings::timeout().map_err(failed)?.unwrap_or(DEFAULT_TIMEOUT))
}
