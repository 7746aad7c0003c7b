//! Process groups: the ranks that take part in collectives together.

use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use flow_kernels::{DType, Element, ReduceOp};

use crate::buffer::{Buffer, SharedBuffer};
use crate::env::Membership;
use crate::error::{Error, Result};
use crate::shm::arena::Arena;
use crate::shm::engine::Engine;
use crate::shm::operation::Kind;
use crate::shm::world::World;
use crate::shm::{Raw, Segments};
use crate::work::{Work, Worker};

/// How long ranks wait for each other unless `FLOW_TIMEOUT` (in seconds) or [`ProcessGroup::set_timeout`] says
/// otherwise: as long as PyTorch's CPU groups do.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(1800);

/// A group of ranks, and this process' place in it.
///
/// Every rank of a group calls the same collectives in the same order with the same sizes and types; the group checks
/// that they do. Results of reductions are the same bits on all ranks: operands are taken in rank order. An error
/// makes the group unusable on all ranks; sub-groups and the group they came from fail apart.
///
/// Clones are the same group.
#[derive(Clone)]
pub struct ProcessGroup {
    inner: Arc<Inner>,
}

struct Inner {
    // Before `engine`: their threads must end first.
    workers: Mutex<HashMap<Lane, Arc<Worker>>>,
    engine: Arc<Engine>,
    local_rank: usize,
}

/// What keeps its order: collectives, and the messages to and from each rank. Each lane has a thread of its own for
/// its asynchronous operations, so that a rank may send while it waits to receive.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Lane {
    Collectives,
    To(usize),
    From(usize),
}

impl ProcessGroup {
    /// The group of all ranks of the job, as told by the environment: flow-launch's or torchrun's variables (RANK,
    /// WORLD_SIZE, ...), OpenMPI's, or Slurm's; without any, a group of this process alone.
    ///
    /// Waits for all ranks. All ranks must call it equally often. Errors: a contradiction in the variables, ranks
    /// that do not come, ranks on several machines.
    pub fn from_env() -> Result<Self> {
        let membership = Membership::from_env()?;
        let timeout = timeout_from_env(membership.rank)?;
        Self::join(&membership, timeout)
    }

    /// As [`ProcessGroup::from_env`], with the place in the job and the timeout given.
    pub fn join(membership: &Membership, timeout: Duration) -> Result<Self> {
        let world = Arc::new(World::join(membership, timeout)?);
        let (control, ranks) = (world.root_control(), (0..world.size).collect());
        Ok(Self::of(Engine::new(world, control, None, ranks, timeout), membership.local_rank))
    }

    fn of(engine: Engine, local_rank: usize) -> Self {
        Self { inner: Arc::new(Inner { workers: Mutex::default(), engine: Arc::new(engine), local_rank }) }
    }

    /// This process' number in the group.
    pub fn rank(&self) -> usize {
        self.engine().rank
    }

    /// Number of processes in the group.
    pub fn world_size(&self) -> usize {
        self.engine().size()
    }

    /// This process' number among those of the job on this machine: which of its devices to use.
    pub fn local_rank(&self) -> usize {
        self.inner.local_rank
    }

    /// The members' ranks in the job, by their rank in this group.
    pub fn ranks(&self) -> &[usize] {
        &self.engine().ranks
    }

    /// How long this rank waits for others before the group fails.
    pub fn timeout(&self) -> Duration {
        self.engine().timeout()
    }

    /// Changes how long this rank waits; groups made from this one start with the new value.
    pub fn set_timeout(&self, timeout: Duration) {
        self.engine().set_timeout(timeout);
    }

    /// A group of some of this group's ranks, given by their ranks in this group; they are numbered in ascending
    /// order. Called by all ranks of this group with the same list; `None` on ranks that are not in it.
    pub fn new_group(&self, ranks: &[usize]) -> Result<Option<Self>> {
        let mut members = ranks.to_vec();
        members.sort_unstable();
        members.dedup();
        if members.len() != ranks.len() || members.is_empty() || members[members.len() - 1] >= self.world_size() {
            let reason = format!("{ranks:?} must be different ranks from 0 to {}", self.world_size() - 1);
            return Err(self.argument("new_group", reason));
        }
        let engine = self.engine();
        let block = if members[0] == self.rank() {
            let no_memory = || self.system("new_group", "the shared memory region of this rank is full".into());
            Some(engine.world.new_control_block(members.len()).ok_or_else(no_memory)?)
        } else {
            None
        };
        let list = fingerprint(&members);
        let offset = block.as_ref().map_or(0, |b| b.offset() as u64);
        let words = self.idle(Lane::Collectives, |engine| engine.exchange_words(Kind::NewGroup, &[list, offset]))?;
        if let Some(other) = words.iter().position(|w| w[0] != list) {
            let detail = format!(
                "rank {} called new_group with {ranks:?}, rank {} with other ranks",
                engine.world.rank, engine.ranks[other]
            );
            return Err(engine.fail(Error::Mismatch { rank: engine.world.rank, detail }));
        }
        if !members.contains(&self.rank()) {
            return Ok(None);
        }
        let control =
            crate::shm::Control::attach(Arc::clone(&engine.world.arena), words[members[0]][1] as usize, members.len());
        let global = members.iter().map(|&r| engine.ranks[r]).collect();
        let engine = Engine::new(Arc::clone(&engine.world), control, block, global, self.timeout());
        Ok(Some(Self::of(engine, self.inner.local_rank)))
    }

    /// A group of the same ranks with collectives of its own, which do not mix with this one's.
    pub fn duplicate(&self) -> Result<Self> {
        let all: Vec<usize> = (0..self.world_size()).collect();
        self.new_group(&all)?.ok_or_else(|| self.system("duplicate", "this rank is not a member".into()))
    }

    /// `len` zeros in memory that collectives use in place.
    pub fn alloc_shared<T: Element>(&self, len: usize) -> Result<SharedBuffer<T>> {
        let full = || self.system("alloc_shared", format!("no room for {len} x {} in this rank's region", T::DTYPE));
        SharedBuffer::new(&self.engine().world.arena, len).ok_or_else(full)
    }

    /// The memory that all ranks of the machine map.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.engine().world.arena
    }

    /// Reduces `buffer` element by element over all ranks; all get the result.
    pub fn all_reduce<B: Buffer + ?Sized>(&self, buffer: &mut B, op: ReduceOp) -> Result<()> {
        let (data, dtype) = self.raw_mut("all_reduce", buffer)?;
        self.idle(Lane::Collectives, |engine| engine.all_reduce(data, dtype, op))
    }

    /// As [`ProcessGroup::all_reduce`]; only rank `root` gets the result, the other buffers stay as they are.
    pub fn reduce<B: Buffer + ?Sized>(&self, buffer: &mut B, op: ReduceOp, root: usize) -> Result<()> {
        self.check_rank("reduce", "root", root)?;
        let (data, dtype) = self.raw_mut("reduce", buffer)?;
        self.idle(Lane::Collectives, |engine| engine.reduce(data, dtype, op, root))
    }

    /// Copies rank `root`'s `buffer` to all ranks'.
    pub fn broadcast<B: Buffer + ?Sized>(&self, buffer: &mut B, root: usize) -> Result<()> {
        self.check_rank("broadcast", "root", root)?;
        let (data, dtype) = self.raw_mut("broadcast", buffer)?;
        self.idle(Lane::Collectives, |engine| engine.broadcast(data, dtype, root))
    }

    /// All ranks' `input`, in rank order, to every rank's `output`, which is world size times as long.
    pub fn all_gather<I, O>(&self, input: &I, output: &mut O) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let (input, output, dtype) = self.pair("all_gather", input, output, (1, self.world_size()))?;
        self.idle(Lane::Collectives, |engine| engine.all_gather(input, output, dtype))
    }

    /// As [`ProcessGroup::all_gather`], to rank `root` only, which gives `Some` output; the others give `None`.
    pub fn gather<I, O>(&self, input: &I, output: Option<&mut O>, root: usize) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        self.check_rank("gather", "root", root)?;
        self.check_root_side("gather", "output", output.is_some(), root)?;
        let (input, output, dtype) = match output {
            Some(output) => {
                let (input, output, dtype) = self.pair("gather", input, output, (1, self.world_size()))?;
                (input, Some(output), dtype)
            }
            None => {
                let (input, dtype) = self.raw("gather", input)?;
                (input, None, dtype)
            }
        };
        self.idle(Lane::Collectives, |engine| engine.gather(input, output, dtype, root))
    }

    /// Gives block r of rank `root`'s `input` (world size blocks, each as long as `output`) to rank r. The root gives
    /// `Some` input, the others `None`.
    pub fn scatter<I, O>(&self, input: Option<&I>, output: &mut O, root: usize) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        self.check_rank("scatter", "root", root)?;
        self.check_root_side("scatter", "input", input.is_some(), root)?;
        let (input, output, dtype) = match input {
            Some(input) => {
                let (input, output, dtype) = self.pair("scatter", input, output, (self.world_size(), 1))?;
                (Some(input), output, dtype)
            }
            None => {
                let (output, dtype) = self.raw_mut("scatter", output)?;
                (None, output, dtype)
            }
        };
        self.idle(Lane::Collectives, |engine| engine.scatter(input, output, dtype, root))
    }

    /// Reduces `input` (world size blocks, each as long as `output`) over all ranks; rank r gets block r.
    pub fn reduce_scatter<I, O>(&self, input: &I, output: &mut O, op: ReduceOp) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let (input, output, dtype) = self.pair("reduce_scatter", input, output, (self.world_size(), 1))?;
        self.idle(Lane::Collectives, |engine| engine.reduce_scatter(input, output, dtype, op))
    }

    /// Block s of rank r's `output` becomes block r of rank s' `input`; both are world size equal blocks.
    pub fn all_to_all<I, O>(&self, input: &I, output: &mut O) -> Result<()>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let (input, output, dtype) = self.pair("all_to_all", input, output, (1, 1))?;
        if !(input.bytes / dtype.size()).is_multiple_of(self.world_size()) {
            let reason = format!(
                "{} elements cannot be divided into {} equal blocks",
                input.bytes / dtype.size(),
                self.world_size()
            );
            return Err(self.argument("all_to_all", reason));
        }
        self.idle(Lane::Collectives, |engine| engine.all_to_all(input, output, dtype))
    }

    /// Sends `data` to rank `to`, which calls [`ProcessGroup::recv`] with the same size and type. May return before
    /// it does. Messages between two ranks keep their order.
    pub fn send<B: Buffer + ?Sized>(&self, data: &B, to: usize) -> Result<()> {
        self.check_peer("send", to)?;
        let (data, dtype) = self.raw("send", data)?;
        self.idle(Lane::To(to), |engine| engine.send(data, dtype, to))
    }

    /// Receives what rank `from` sends next.
    pub fn recv<B: Buffer + ?Sized>(&self, buffer: &mut B, from: usize) -> Result<()> {
        self.check_peer("recv", from)?;
        let (data, dtype) = self.raw_mut("recv", buffer)?;
        self.idle(Lane::From(from), |engine| engine.recv(data, dtype, from))
    }

    /// Returns when all ranks of the group have called it.
    pub fn barrier(&self) -> Result<()> {
        self.idle(Lane::Collectives, Engine::barrier)
    }

    /// Starts [`ProcessGroup::all_reduce`] on `buffer`, which [`Work::wait`] returns.
    pub fn all_reduce_async<B: Buffer + Send + 'static>(&self, mut buffer: B, op: ReduceOp) -> Result<Work<B>> {
        self.start(Lane::Collectives, "all_reduce", move |group| group.all_reduce(&mut buffer, op).map(|()| buffer))
    }

    /// Starts [`ProcessGroup::reduce`].
    pub fn reduce_async<B: Buffer + Send + 'static>(
        &self,
        mut buffer: B,
        op: ReduceOp,
        root: usize,
    ) -> Result<Work<B>> {
        self.start(Lane::Collectives, "reduce", move |group| group.reduce(&mut buffer, op, root).map(|()| buffer))
    }

    /// Starts [`ProcessGroup::broadcast`].
    pub fn broadcast_async<B: Buffer + Send + 'static>(&self, mut buffer: B, root: usize) -> Result<Work<B>> {
        self.start(Lane::Collectives, "broadcast", move |group| group.broadcast(&mut buffer, root).map(|()| buffer))
    }

    /// Starts [`ProcessGroup::all_gather`]; both buffers come back.
    pub fn all_gather_async<I, O>(&self, input: I, mut output: O) -> Result<Work<(I, O)>>
    where
        I: Buffer + Send + 'static,
        O: Buffer + Send + 'static,
    {
        self.start(Lane::Collectives, "all_gather", move |group| {
            group.all_gather(&input, &mut output).map(|()| (input, output))
        })
    }

    /// Starts [`ProcessGroup::reduce_scatter`]; both buffers come back.
    pub fn reduce_scatter_async<I, O>(&self, input: I, mut output: O, op: ReduceOp) -> Result<Work<(I, O)>>
    where
        I: Buffer + Send + 'static,
        O: Buffer + Send + 'static,
    {
        self.start(Lane::Collectives, "reduce_scatter", move |group| {
            group.reduce_scatter(&input, &mut output, op).map(|()| (input, output))
        })
    }

    /// Starts [`ProcessGroup::all_to_all`]; both buffers come back.
    pub fn all_to_all_async<I, O>(&self, input: I, mut output: O) -> Result<Work<(I, O)>>
    where
        I: Buffer + Send + 'static,
        O: Buffer + Send + 'static,
    {
        self.start(Lane::Collectives, "all_to_all", move |group| {
            group.all_to_all(&input, &mut output).map(|()| (input, output))
        })
    }

    /// Starts [`ProcessGroup::gather`]; both buffers come back.
    pub fn gather_async<I, O>(&self, input: I, mut output: Option<O>, root: usize) -> Result<Work<(I, Option<O>)>>
    where
        I: Buffer + Send + 'static,
        O: Buffer + Send + 'static,
    {
        self.start(Lane::Collectives, "gather", move |group| {
            group.gather(&input, output.as_mut(), root).map(|()| (input, output))
        })
    }

    /// Starts [`ProcessGroup::scatter`]; both buffers come back.
    pub fn scatter_async<I, O>(&self, input: Option<I>, mut output: O, root: usize) -> Result<Work<(Option<I>, O)>>
    where
        I: Buffer + Send + 'static,
        O: Buffer + Send + 'static,
    {
        self.start(Lane::Collectives, "scatter", move |group| {
            group.scatter(input.as_ref(), &mut output, root).map(|()| (input, output))
        })
    }

    /// Starts [`ProcessGroup::send`]; the data comes back when it has been sent.
    pub fn send_async<B: Buffer + Send + 'static>(&self, data: B, to: usize) -> Result<Work<B>> {
        self.start(Lane::To(to), "send", move |group| group.send(&data, to).map(|()| data))
    }

    /// Starts [`ProcessGroup::recv`].
    pub fn recv_async<B: Buffer + Send + 'static>(&self, mut buffer: B, from: usize) -> Result<Work<B>> {
        self.start(Lane::From(from), "recv", move |group| group.recv(&mut buffer, from).map(|()| buffer))
    }

    /// Starts [`ProcessGroup::barrier`].
    pub fn barrier_async(&self) -> Result<Work<()>> {
        self.start(Lane::Collectives, "barrier", |group| group.barrier())
    }

    /// A bucket of gradients for [`ProcessGroup::post_bucket`]: pieces of these lengths, in elements.
    pub fn segments(&self, bucket: u32, dtype: DType, lengths: Vec<usize>) -> Result<Segments> {
        let full = || self.system("segments", "the shared memory region of this rank is full".into());
        Segments::new(self.arena(), bucket, dtype, lengths).ok_or_else(full)
    }

    /// Announces a bucket whose pieces are all in place, without waiting; false if too many are under way already.
    /// All ranks post the same buckets in the same order; [`ProcessGroup::progress`] and
    /// [`ProcessGroup::finish_buckets`] reduce them in place.
    pub fn post_bucket(&self, segments: &Arc<Segments>, op: ReduceOp) -> Result<bool> {
        self.engine().post_bucket(segments, op)
    }

    /// Does this rank's share of all posted buckets that all ranks have reached, without waiting.
    pub fn progress(&self) -> Result<()> {
        self.engine().progress()
    }

    /// Waits for all posted buckets. Returns, by bucket number, when each was seen to be finished.
    pub fn finish_buckets(&self) -> Result<Vec<(u32, Instant)>> {
        self.engine().finish_buckets()
    }

    /// Fails the group on all ranks because of something one or more of them found out: all ranks call this (those
    /// with nothing to add with an empty text) and get what all said, by rank in the job.
    pub fn fail_with_notice(&self, operation: &str, own: &str) -> Vec<(usize, String)> {
        self.engine().fail_with_notice(operation, own)
    }

    /// Whether another rank has called [`ProcessGroup::fail_with_notice`].
    pub fn awaits_notice(&self) -> bool {
        self.engine().awaits_notice()
    }

    /// Makes the group unusable on all ranks, whose waits end with `cause`.
    pub fn abort(&self, cause: &str) {
        self.engine().abort(cause);
    }

    fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    /// Runs a blocking operation after the asynchronous ones of its lane that were started before it.
    fn idle<T>(&self, lane: Lane, operation: impl FnOnce(&Engine) -> Result<T>) -> Result<T> {
        let worker = self.workers().get(&lane).cloned();
        if let Some(worker) = worker {
            worker.drain();
        }
        operation(self.engine())
    }

    fn start<T: Send + 'static>(
        &self,
        lane: Lane,
        operation: &'static str,
        run: impl FnOnce(&ProcessGroup) -> Result<T> + Send + 'static,
    ) -> Result<Work<T>> {
        // On the worker's side the group has no workers: its operations run at once, and it keeps no thread alive.
        let group = Self {
            inner: Arc::new(Inner {
                workers: Mutex::default(),
                engine: Arc::clone(&self.inner.engine),
                local_rank: self.inner.local_rank,
            }),
        };
        let worker = match self.workers().entry(lane) {
            Entry::Occupied(worker) => Arc::clone(worker.get()),
            Entry::Vacant(none) => {
                let started = Worker::start(self.rank());
                let worker = started.map_err(|e| self.system(operation, format!("cannot start a thread: {e}")))?;
                Arc::clone(none.insert(Arc::new(worker)))
            }
        };
        Ok(worker.submit(self.rank(), operation, move || run(&group)))
    }

    fn workers(&self) -> MutexGuard<'_, HashMap<Lane, Arc<Worker>>> {
        self.inner.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn raw<B: Buffer + ?Sized>(&self, operation: &str, buffer: &B) -> Result<(Raw, DType)> {
        let bytes = buffer.bytes();
        // Collectives only read what they are given as input.
        self.elements(operation, Raw { data: bytes.as_ptr().cast_mut(), bytes: bytes.len() }, buffer.dtype())
    }

    fn raw_mut<B: Buffer + ?Sized>(&self, operation: &str, buffer: &mut B) -> Result<(Raw, DType)> {
        let dtype = buffer.dtype();
        let bytes = buffer.bytes_mut();
        self.elements(operation, Raw { data: bytes.as_mut_ptr(), bytes: bytes.len() }, dtype)
    }

    /// Checks that memory consists of aligned elements: nothing at all may lie anywhere.
    fn elements(&self, operation: &str, raw: Raw, dtype: DType) -> Result<(Raw, DType)> {
        let aligned = raw.bytes == 0 || (raw.data as usize).is_multiple_of(dtype.size());
        if aligned && raw.bytes.is_multiple_of(dtype.size()) {
            return Ok((raw, dtype));
        }
        let reason = format!("{} bytes at {:p} are not aligned elements of {dtype}", raw.bytes, raw.data);
        Err(self.argument(operation, reason))
    }

    /// Input and output whose lengths must be in the ratio `(input, output)`.
    fn pair<I, O>(&self, operation: &str, input: &I, output: &mut O, ratio: (usize, usize)) -> Result<(Raw, Raw, DType)>
    where
        I: Buffer + ?Sized,
        O: Buffer + ?Sized,
    {
        let (input, from) = self.raw(operation, input)?;
        let (output, to) = self.raw_mut(operation, output)?;
        if from != to {
            return Err(self.argument(operation, format!("input is {from} but output is {to}: they must be alike")));
        }
        if input.bytes * ratio.1 != output.bytes * ratio.0 {
            let reason = format!(
                "input of {} and output of {} elements do not fit: output must be {} elements",
                input.bytes / from.size(),
                output.bytes / from.size(),
                input.bytes / from.size() * ratio.1 / ratio.0,
            );
            return Err(self.argument(operation, reason));
        }
        Ok((input, output, from))
    }

    fn check_rank(&self, operation: &str, what: &str, rank: usize) -> Result<()> {
        if rank < self.world_size() {
            return Ok(());
        }
        Err(self.argument(operation, format!("{what} {rank} is not a rank: it must be 0 to {}", self.world_size() - 1)))
    }

    fn check_peer(&self, operation: &str, peer: usize) -> Result<()> {
        self.check_rank(operation, "peer", peer)?;
        if peer == self.rank() {
            return Err(self.argument(operation, format!("rank {peer} is this rank itself: a peer is another one")));
        }
        Ok(())
    }

    fn check_root_side(&self, operation: &str, what: &str, given: bool, root: usize) -> Result<()> {
        if given == (self.rank() == root) {
            return Ok(());
        }
        let reason = format!("the root (rank {root}), and no other rank, gives the {what}");
        Err(self.argument(operation, reason))
    }

    fn argument(&self, operation: &str, reason: String) -> Error {
        Error::Argument { rank: self.engine().world.rank, operation: operation.into(), reason }
    }

    fn system(&self, operation: &str, reason: String) -> Error {
        Error::System { rank: self.engine().world.rank, operation: operation.into(), reason }
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProcessGroup(rank {} of {}, {:?})", self.rank(), self.world_size(), self.ranks())
    }
}

/// FNV-1a over the members of a group.
fn fingerprint(ranks: &[usize]) -> u64 {
    ranks.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &rank| (hash ^ rank as u64).wrapping_mul(0x100_0000_01b3))
}

fn timeout_from_env(rank: usize) -> Result<Duration> {
    let Ok(text) = std::env::var("FLOW_TIMEOUT") else { return Ok(DEFAULT_TIMEOUT) };
    let seconds = text.parse::<f64>().ok().and_then(|s| Duration::try_from_secs_f64(s).ok()).filter(|d| !d.is_zero());
    seconds.ok_or_else(|| Error::Argument {
        rank,
        operation: "from_env".into(),
        reason: format!("FLOW_TIMEOUT={text} must be a positive number of seconds"),
    })
}
