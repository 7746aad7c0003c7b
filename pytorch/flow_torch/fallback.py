"""The backend where the C++ part is missing: a process group of Python's. It gives the same results and the same errors, and takes
longer: what is asynchronous runs on threads of Python's, and in backward, where callbacks must come in one order on all ranks, at once.
"""

import collections
import ctypes
import datetime
import os
import threading
import time
import weakref

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from . import buckets, rendezvous
from .functions import REDUCTIONS, Buffer, Membership, flow, is_shared, list_of, number, watch_signals, without_result
from .tensors import (
    alike,
    counts,
    dense,
    divide,
    elements,
    filled,
    joined,
    label,
    number_of,
    of_one_type,
    only,
    reduce_rows,
    reducible,
    room_for,
)
from .works import NO_TIME, Lane, Work, made, within

# Tags of monitored_barrier; programs' are smaller.
ARRIVED, PASSED = 2**32 - 1, 2**32 - 2
# The lane of all collectives; those of messages are called as their peers.
COLLECTIVES = ("collectives",)

dist.Reducer = buckets.Reducer


def join(place, name, timeout):
    """The group of the ranks that join under this name. `place`: the fields of a Membership; None: the environment has them."""
    membership = None
    if place is not None:
        texts = {field: place[field].encode() for field in ("address", "token")}
        membership = ctypes.byref(Membership(**{**place, **texts}))
    watch_signals()
    return ProcessGroup(made("join", membership, name.encode(), timeout.total_seconds()), timeout)


class ProcessGroup(dist.ProcessGroup):
    """torch.distributed and DistributedDataParallel call these methods, by PyTorch's names."""

    def __init__(self, group, timeout):
        self._rank, self._size = number("rank")(group), number("world_size")(group)
        super().__init__(self._rank, self._size)
        self._group, self._timeout, self._process = group, timeout, os.getpid()
        self._lanes, self._groups, self._name, self._lock = {}, collections.Counter(), "", threading.Lock()

    def new_group_of(self, ranks, timeout, _):
        key = f"{','.join(map(str, ranks))}#{self._groups[tuple(ranks)]}"
        self._groups[tuple(ranks)] += 1
        group = made("new_group_of", within(self._group, timeout), list_of(ranks), len(ranks), key.encode())
        return ProcessGroup(group, timeout)

    def merge_remote_group(self, store, size, timeout, group_name=None, group_desc=None):
        group = rendezvous.meet(store, store.add("mergeGroupRank", 1) - 1, size, timeout, "merge_remote_group", join)
        group._set_group_name(group_name or f"{self._name}:merge")
        return group

    supports_shrinking = True

    def shrink(self, *_):
        raise NotImplementedError("flow: shrink_group needs flow_torch's C++ part on all ranks: rank 0 says at the start what is missing")

    def is_shared(self, tensor):
        return is_shared()(self._group, tensor.data_ptr(), tensor.nbytes)

    # Of PyTorch's for C++: here the group is its own backend.
    _device_types = [torch.device("cpu")]

    def supports_tensor_alloc(self, _):
        return True

    def allocate_tensor(self, size, *, dtype, device):
        """A tensor in shared memory, if there is room."""
        shared = self.empty_shared(size, dtype)
        return torch.empty(size, dtype=dtype, device=device) if shared is None else shared

    def empty_shared(self, size, dtype):
        """None if there is no room."""
        self._check()
        block, data, length = ctypes.c_void_p(), ctypes.c_void_p(), max(size * dtype.itemsize, 1)
        try:
            flow("alloc")(self._group, length, ctypes.byref(block), ctypes.byref(data))
        except dist.DistBackendError:
            return None
        memory = (ctypes.c_char * length).from_address(data.value)
        weakref.finalize(memory, without_result("free"), block).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=size) if size else torch.empty(0, dtype=dtype)

    def _get_backend(self, device):
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"flow: no backend for {device}")
        return self

    def getBackendName(self):
        return "flow"

    def setGroupName(self, name):
        self._name = name

    def getGroupName(self):
        return self._name

    group_name = property(getGroupName)

    def set_timeout(self, timeout):
        flow("set_timeout")(self._group, timeout.total_seconds())
        self._timeout = timeout

    def abort(self):
        self.fail("torch.distributed's abort()")

    def fail(self, cause):
        """Makes the group unusable, on all ranks."""
        flow("abort")(self._group, cause.encode())

    def shutdown(self):
        if self._is_forked():
            return
        with self._lock:
            lanes, self._lanes = self._lanes, {}
            # Left with its last operation.
            self._group = None
        for lane in lanes.values():
            lane.close()

    # Of collectives, each with a function that takes the group.

    def allreduce(self, tensors, opts=None):
        tensor, opts = only(tensors), opts or c10d.AllreduceOptions()
        if tensor.layout == torch.sparse_coo:
            return self._all_reduce_sparse(tensor, opts)
        op = number_of(opts.reduceOp)
        code = reducible(dense(tensor), op)

        def run(group):
            with filled(tensor) as own:
                if code is not None:
                    flow("all_reduce")(group, elements(own, code), REDUCTIONS[op])
                else:
                    rows = own.new_empty((self._size, own.numel()))
                    flow("all_gather")(group, elements(own), elements(rows))
                    reduce_rows(op, rows, own)

        return self._begin(run, tensors, opts, "all_reduce", tensor)

    def reduce(self, tensors, opts):
        tensor, root, op = dense(only(tensors)), opts.rootRank, number_of(opts.reduceOp)
        code = reducible(tensor, op)

        def run(group):
            own = tensor.contiguous()
            if code is not None:
                flow("reduce")(group, elements(own, code), REDUCTIONS[op], root)
            else:
                rows = own.new_empty((self._size if self._rank == root else 0, own.numel()))
                flow("gather")(group, elements(own), elements(rows), root)
                if self._rank == root:
                    reduce_rows(op, rows, own)
            if self._rank == root and own is not tensor:
                tensor.copy_(own)

        return self._begin(run, tensors, opts, "reduce", tensor)

    def broadcast(self, tensors, opts):
        tensor = dense(only(tensors))

        def run(group):
            with filled(tensor) as own:
                flow("broadcast")(group, elements(own), opts.rootRank)

        return self._begin(run, tensors, opts, "broadcast", tensor)

    def allgather(self, outputs, inputs, opts=None):
        input_, output = dense(only(inputs)), self._of_ranks(only(outputs))
        of_one_type(output, input_)

        def run(group):
            all_ = room_for(output)
            flow("all_gather_v")(group, elements(input_.contiguous()), elements(all_), counts(output))
            divide(all_, output)

        return self._begin(run, output, opts or c10d.AllgatherOptions(), "all_gather", input_)

    def _allgather_base(self, output, input_, opts=None):
        of_one_type([dense(output)], dense(input_))

        def run(group):
            with filled(output) as own:
                flow("all_gather")(group, elements(input_.contiguous()), elements(own))

        return self._begin(run, [output], opts or c10d.AllgatherOptions(), "all_gather", input_)

    def gather(self, outputs, inputs, opts):
        input_, root = dense(only(inputs)), opts.rootRank
        output = self._of_ranks(only(outputs)) if self._rank == root else []
        alike(output, input_)

        def run(group):
            rows = input_.new_empty((len(output), input_.numel()))
            flow("gather")(group, elements(input_.contiguous()), elements(rows), root)
            divide(rows.view(-1), output)

        return self._begin(run, output, opts, "gather", input_)

    def scatter(self, outputs, inputs, opts):
        output, root = dense(only(outputs)), opts.rootRank
        input_ = self._of_ranks(only(inputs)) if self._rank == root else []
        alike(input_, output)

        def run(group):
            all_ = joined(input_) if input_ else None
            with filled(output) as own:
                flow("scatter")(group, elements(all_) if input_ else Buffer(), elements(own), root)

        return self._begin(run, outputs, opts, "scatter", output)

    def reduce_scatter(self, outputs, inputs, opts=None):
        output, input_, opts = dense(only(outputs)), self._of_ranks(only(inputs)), opts or c10d.ReduceScatterOptions()
        alike([input_[self._rank]], output)
        return self._reduce_scatter(output, lambda: joined(input_), [part.numel() for part in input_], opts)

    def _reduce_scatter_base(self, output, input_, opts=None):
        of_one_type([dense(output)], dense(input_))
        if input_.numel() != output.numel() * self._size:
            raise ValueError(f"flow: the input must be {self._size} times as long as the output")
        return self._reduce_scatter(output, input_.contiguous, [output.numel()] * self._size, opts or c10d.ReduceScatterOptions())

    def _reduce_scatter(self, output, flat, lengths, opts):
        op = number_of(opts.reduceOp)
        code = reducible(output, op)

        def run(group):
            all_ = flat()
            with filled(output) as own:
                if code is not None:
                    flow("reduce_scatter_v")(group, elements(all_, code), elements(own, code), list_of(lengths), REDUCTIONS[op])
                    return
                rows = own.new_empty((self._size, own.numel()))
                unit = elements(own.new_empty(1)).count
                received = [own.numel() * unit] * self._size
                sent = [length * unit for length in lengths]
                flow("all_to_all_v")(group, elements(all_), list_of(sent), elements(rows), list_of(received))
                reduce_rows(op, rows, own)

        return self._begin(run, [output], opts, "reduce_scatter", output)

    def alltoall_base(self, output, input_, output_splits, input_splits, opts=None):
        of_one_type([dense(output)], dense(input_))
        received, sent = (self._parts(tensor, splits) for tensor, splits in ((output, output_splits), (input_, input_splits)))

        def run(group):
            with filled(output) as own:
                flow("all_to_all_v")(group, elements(input_.contiguous()), list_of(sent), elements(own), list_of(received))

        return self._begin(run, [output], opts or c10d.AllToAllOptions(), "all_to_all", input_)

    def alltoall(self, outputs, inputs, opts=None):
        output, input_ = self._of_ranks(outputs), self._of_ranks(inputs)
        of_one_type(output, input_[0])

        def run(group):
            from_, to = joined(input_), room_for(output)
            flow("all_to_all_v")(group, elements(from_), counts(input_), elements(to), counts(output))
            divide(to, output)

        return self._begin(run, outputs, opts or c10d.AllToAllOptions(), "all_to_all", input_[0])

    def barrier(self, opts=None):
        return self._begin(flow("barrier"), [], opts or c10d.BarrierOptions())

    # Of several tensors: the last operation stands for all.

    def allreduce_coalesced(self, tensors, opts=None):
        return self._each(tensors, opts, lambda i: self.allreduce([tensors[i]], opts))

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        return self._each(inputs, opts, lambda i: self._allgather_base(outputs[i], inputs[i], opts))

    def allgather_coalesced(self, outputs, inputs, opts=None):
        return self._each(inputs, opts, lambda i: self.allgather([[of_rank[i] for of_rank in outputs]], [inputs[i]], opts))

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        return self._each(inputs, opts, lambda i: self._reduce_scatter_base(outputs[i], inputs[i], opts))

    def _each(self, inputs, opts, start):
        works = [start(i) for i in range(len(inputs))]

        def run(_):
            for work in works:
                if work.error is not None:
                    raise work.error

        return self._begin(run, [result for work in works for result in work.results], opts or c10d.AllreduceOptions())

    # The names since PyTorch 2.13; the last one since 2.14. What is C++ gets the calls by the old names from torch's own class.

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def gather_single(self, output, input_, opts):
        return self.gather([list(output.view(self._size, -1))] if self._rank == opts.rootRank else [], [input_], opts)

    # Of messages.

    def send(self, tensors, to, tag=0):
        tensor = dense(only(tensors))

        def run(group, _):
            flow("send")(group, elements(tensor.contiguous()), to, tag)

        return self._message("send", run, tensors, ("to", to), tag)

    def recv(self, tensors, source, tag=0):
        tensor = dense(only(tensors))

        def run(group, work):
            with filled(tensor) as own:
                flow("recv")(group, elements(own), source, tag)
            work.source = source

        return self._message("recv", run, tensors, ("from", source, tag), tag)

    def recv_anysource(self, tensors, tag=0):
        tensor = dense(only(tensors))

        def run(group, work):
            source = ctypes.c_size_t()
            with filled(tensor) as own:
                flow("recv_any")(group, elements(own), tag, ctypes.byref(source))
            work.source = source.value

        return self._message("recv", run, tensors, ("from any", tag), tag)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """Messages to rank 0 and back, so that rank 0 knows who has not come. If ranks are missing, the group is of no more use."""
        timeout = self._timeout if timeout is None else timeout
        self._begin(lambda _: self._run_monitored_barrier(timeout, wait_all_ranks), [], c10d.BarrierOptions()).wait()

    def _run_monitored_barrier(self, timeout, wait_all_ranks):
        word = torch.zeros(1, dtype=torch.uint8)
        group = within(self._group, timeout)
        if self._rank != 0:
            try:
                flow("send")(group, elements(word), 0, ARRIVED)
                flow("recv")(group, elements(word), 0, PASSED)
            except dist.DistBackendError as error:
                raise dist.DistBackendError(
                    f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
                    f"rank 0: {error}"
                ) from None
            return
        milliseconds = int(timeout.total_seconds() * 1000)
        if timeout <= NO_TIME:
            raise dist.DistBackendError(f"Rank 0 timed out in monitoredBarrier after {milliseconds} ms")
        end, missing, source = time.monotonic() + timeout.total_seconds(), set(range(1, self._size)), ctypes.c_size_t()
        while missing:
            left = datetime.timedelta(seconds=max(end - time.monotonic(), 0.001))
            try:
                flow("recv_any")(within(self._group, left), elements(word), ARRIVED, ctypes.byref(source))
            except dist.DistBackendError as error:
                named = sorted(missing)[: None if wait_all_ranks else 1]
                ranks = ("Ranks " if len(named) > 1 else "Rank ") + ", ".join(map(str, named))
                raise dist.DistBackendError(f"{ranks} failed to pass monitoredBarrier in {milliseconds} ms: {error}") from None
            missing.discard(source.value)
        for rank in range(1, self._size):
            flow("send")(self._group, elements(word), rank, PASSED)

    # How they run.

    def _begin(self, job, results, opts, operation="", tensor=None):
        """Begins a collective; `tensor` is one of those that it moves."""
        self._check()
        reduction = getattr(opts, "reduceOp", None)
        elements = "" if tensor is None else label(tensor, reduction and number_of(reduction))
        work = Work(self._group, job, list(results), opts.timeout, operation, elements)
        if self._is_forked():  # it has no threads
            work.run()
            return work
        in_backward = torch._C._current_graph_task_id() != -1
        with self._lock:
            lane = self._lane(COLLECTIVES)
            # In a callback as well.
            is_here = in_backward or not opts.asyncOp or lane.is_own()
            if not is_here:
                lane.put(work)
        if is_here:
            lane.run_here(work)
        if in_backward and work.error is not None:
            raise work.error
        return work

    def _check(self):
        if self._group is None:
            raise dist.DistBackendError("flow: the group was destroyed")

    def _message(self, operation, run, tensors, peer, tag):
        self._check()
        if tag < 0:
            raise ValueError(f"flow: a tag must not be negative: {tag}")
        work = Work(self._group, None, list(tensors), NO_TIME, operation, label(only(tensors)))
        work.job = lambda group: run(group, work)
        if self._is_forked():
            work.run()
            return work
        with self._lock:
            self._lane(peer, receives=peer[0] != "to").put(work)
        return work

    def _is_forked(self):
        return os.getpid() != self._process

    def _lane(self, key, receives=False):
        self._check()  # again: another thread may destroy it
        if key not in self._lanes:
            self._close_idle_lanes()
            self._lanes[key] = Lane(receives)
        return self._lanes[key]

    def _close_idle_lanes(self):
        """Closes idle lanes of messages with tags: programs may use any number of these, each for a short time."""
        for key, lane in list(self._lanes.items()):
            if len(key) > 1 and key[0] != "to" and key[-1] > 0 and lane.is_idle():
                self._lanes.pop(key).close()

    def _all_reduce_sparse(self, tensor, opts):
        """The sum of everybody's entries."""
        if opts.reduceOp != dist.ReduceOp.SUM:
            raise RuntimeError("unsupported reduction operation: sparse tensors can only be summed up")

        def run(group):
            self._check_alike(group, tensor)
            own = tensor.coalesce()
            entries, of_ranks = torch.tensor([own._nnz()]), torch.zeros(self._size, dtype=torch.int64)
            flow("all_gather")(group, elements(entries), elements(of_ranks))

            def gathered(rows):
                all_ = rows.new_empty((int(of_ranks.sum()), *rows.shape[1:]))
                unit = elements(rows.new_empty((1, *rows.shape[1:]))).count
                flow("all_gather_v")(group, elements(rows), elements(all_), list_of([count * unit for count in of_ranks.tolist()]))
                return all_

            indices, values = gathered(own.indices().t().contiguous()), gathered(own.values().contiguous())
            tensor.copy_(torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce())

        return self._begin(run, [tensor], opts, "all_reduce", tensor)

    def _check_alike(self, group, tensor):
        """An error on all ranks if the sparse tensor is not on all of them what it is on rank 0."""
        dtypes = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
        own = torch.zeros(64, dtype=torch.int64)
        own[: tensor.dim() + 3] = torch.tensor([dtypes.index(tensor.dtype), tensor.sparse_dim(), tensor.dim(), *tensor.shape])
        rows = own.new_empty((self._size, len(own)))
        flow("all_gather")(group, elements(own), elements(rows))
        shown = [f"{sizes[:dims]} of {dtypes[dtype]}, {sparse} of the dimensions sparse" for dtype, sparse, dims, *sizes in rows.tolist()]
        for rank, its in enumerate(shown):
            if its != shown[0]:
                raise RuntimeError(f"flow: the sparse tensors of an all_reduce must be alike: rank 0 has {shown[0]}, and rank {rank} has {its}")

    def _of_ranks(self, tensors):
        if len(tensors) != self._size:
            raise RuntimeError(f"flow: a tensor for each of {self._size} ranks is expected, not {len(tensors)}")
        of_one_type([dense(tensor) for tensor in tensors], tensors[0])
        return tensors

    def _parts(self, tensor, splits):
        """Returns how many elements go to each rank, or come from there."""
        if not tensor.dim():
            raise RuntimeError("flow: tensors of all_to_all_single need rows to divide")
        rows = tensor.shape[0]
        if not splits and rows % self._size:
            raise RuntimeError(f"flow: {rows} rows cannot be divided among {self._size} ranks")
        splits = list(splits) or [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise RuntimeError(f"flow: splits {splits}: {self._size} numbers are expected, which add up to {rows}")
        unit = elements(tensor).count // max(rows, 1)
        return [split * unit for split in splits]
