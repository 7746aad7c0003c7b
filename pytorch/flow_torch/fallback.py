"""The backend where the C++ part is missing: a process group of Python's. It gives the same results and the same errors, and takes
longer: what is asynchronous runs on threads of Python's, and in backward, where callbacks must come in one order on all ranks, at once.
"""

import collections
import contextlib
import ctypes
import datetime
import os
import queue
import threading
import time
import weakref

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from .functions import DTYPES, REDUCTIONS, Buffer, Membership, flow, leave, list_of, number

OPS = dist.ReduceOp
NO_TIME = datetime.timedelta(0)
UINT8 = DTYPES[torch.uint8]
# Tags of monitored_barrier; programs' are smaller.
ARRIVED, PASSED = 2**32 - 1, 2**32 - 2
BITWISE = {OPS.BAND: torch.bitwise_and, OPS.BOR: torch.bitwise_or, OPS.BXOR: torch.bitwise_xor}
COMBINE = {OPS.SUM: torch.add, OPS.PRODUCT: torch.mul, OPS.MIN: torch.minimum, OPS.MAX: torch.maximum, **BITWISE}
COMBINE_BOOL = {**COMBINE, OPS.SUM: torch.logical_or, OPS.PRODUCT: torch.logical_and}


def Place(address, token, **numbers):
    return Membership(address=address.encode(), token=token.encode(), **numbers)


def join(place, name, timeout):
    group = _made("join", place and ctypes.byref(place), name.encode(), timeout.total_seconds())
    return ProcessGroup(group, timeout)


class _Group:
    """A flow_group, which is left with its last user."""

    def __init__(self, handle):
        self._as_parameter_ = handle
        # At the end of the process threads may still wait in it.
        weakref.finalize(self, leave(), handle).atexit = False


def _made(function, *arguments):
    handle = ctypes.c_void_p()
    flow(function)(*arguments, ctypes.byref(handle))
    return _Group(handle)


def _within(group, timeout):
    """The group for an operation with this timeout, of which 0 and less mean the group's own."""
    return _made("with_timeout", group, timeout.total_seconds()) if timeout > NO_TIME else group


class _Work(dist.Work):
    """An operation, and how it has ended."""

    def __init__(self, group, job, results, timeout, lane):
        super().__init__()
        self.group, self.job, self.results, self.timeout, self.lane = group, job, results, timeout, lane
        self.error, self.source, self.ended = None, -1, threading.Event()
        # The second, as only an error that a callback raises is one for C++ as well.
        self.over = torch.futures.Future()
        self.future = self.over.then(self.outcome)
        self.process = os.getpid()

    def run(self):
        try:
            with torch.no_grad():
                self.job(_within(self.group, self.timeout))
        except Exception as error:
            self.error = error
        self.end()

    def end(self):
        self.job = None
        self.ended.set()
        self.over.set_result(None)

    def outcome(self, _):
        if self.error is not None:
            raise self.error
        return self.results

    def wait(self, timeout=NO_TIME):
        if os.getpid() != self.process and not self.ended.is_set():
            raise dist.DistBackendError("flow: this process was forked from a rank, and only there the operation can be waited for")
        if self.lane is threading.current_thread():  # a callback
            self.lane.run_up_to(self)
        if not self.ended.wait(timeout.total_seconds() if timeout > NO_TIME else None):
            cause = f"an operation, with those before it, has not ended in the {timeout.total_seconds():g} s of its wait()"
            flow("abort")(self.group, cause.encode())
            raise dist.DistBackendError(f"flow: {cause}")
        if self.error is not None:
            raise self.error
        return True

    def get_future(self):
        return self.future

    def is_completed(self):
        return self.ended.is_set()

    def is_success(self):
        return self.ended.is_set() and self.error is None

    def exception(self):
        return self.error

    def result(self):
        return self.results

    def source_rank(self):
        return self.source

    _source_rank = source_rank

    def synchronize(self):
        self.wait()


class _Lane(threading.Thread):
    """Runs operations one after the other."""

    def __init__(self, receives=False):
        super().__init__(name="flow", daemon=True)
        self.receives, self.operations = receives, queue.SimpleQueue()
        self.start()

    def run(self):
        while (work := self.operations.get()) is not None:
            work.run()

    def run_up_to(self, last):
        while not last.ended.is_set() and (work := self.operations.get()) is not None:
            work.run()

    def close(self):
        """Runs what there is; but receives fail, as nobody may ever send, and one that is under way is left to this thread."""
        with contextlib.suppress(queue.Empty):
            while self.receives:
                work = self.operations.get_nowait()
                work.error = dist.DistBackendError("flow: the group was destroyed before this message came")
                work.end()
        self.operations.put(None)
        if not self.receives and self is not threading.current_thread():
            self.join()


class ProcessGroup(dist.ProcessGroup):
    """torch.distributed and DistributedDataParallel call these methods, by PyTorch's names."""

    def __init__(self, group, timeout):
        self._rank, self._size = number("rank")(group), number("world_size")(group)
        super().__init__(self._rank, self._size)
        self._group, self._timeout, self._process = group, timeout, os.getpid()
        self._lanes, self._groups, self._name, self._lock = {}, collections.Counter(), "", threading.Lock()

    def new_group_of(self, ranks, timeout):
        key = f"{','.join(map(str, ranks))}#{self._groups[tuple(ranks)]}"
        self._groups[tuple(ranks)] += 1
        made = _made("new_group_of", _within(self._group, timeout), list_of(ranks), len(ranks), key.encode())
        return ProcessGroup(made, timeout)

    def is_shared(self, _):
        return False

    # Of PyTorch's for C++: here the group is its own backend.
    _device_types = [torch.device("cpu")]

    def supports_tensor_alloc(self, _):
        return False

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
        flow("abort")(self._group, b"torch.distributed's abort()")

    def shutdown(self):
        if os.getpid() == self._process:
            for lane in list(self._lanes.values()):
                lane.close()
            self._lanes.clear()
            # Left with its last operation.
            self._group = None

    # Of collectives, each with a function that takes the group.

    def allreduce(self, tensors, opts=None):
        tensor, opts = _only(tensors), opts or c10d.AllreduceOptions()
        if tensor.layout == torch.sparse_coo:
            return self._all_reduce_sparse(tensor, opts)
        code = _reducible(_dense(tensor), opts.reduceOp)

        def run(group):
            with _filled(tensor) as own:
                if code is not None:
                    flow("all_reduce")(group, _elements(own, code), _op(opts.reduceOp))
                else:
                    rows = own.new_empty((self._size, own.numel()))
                    flow("all_gather")(group, _elements(own), _elements(rows))
                    _reduce_rows(opts.reduceOp, rows, own)

        return self._begin(run, tensors, opts)

    def reduce(self, tensors, opts):
        tensor, root = _dense(_only(tensors)), opts.rootRank
        code = _reducible(tensor, opts.reduceOp)

        def run(group):
            own = tensor.contiguous()
            if code is not None:
                flow("reduce")(group, _elements(own, code), _op(opts.reduceOp), root)
            else:
                rows = own.new_empty((self._size if self._rank == root else 0, own.numel()))
                flow("gather")(group, _elements(own), _elements(rows), root)
                if self._rank == root:
                    _reduce_rows(opts.reduceOp, rows, own)
            if self._rank == root and own is not tensor:
                tensor.copy_(own)

        return self._begin(run, tensors, opts)

    def broadcast(self, tensors, opts):
        tensor = _dense(_only(tensors))

        def run(group):
            with _filled(tensor) as own:
                flow("broadcast")(group, _elements(own), opts.rootRank)

        return self._begin(run, tensors, opts)

    def allgather(self, outputs, inputs, opts=None):
        input_, output = _dense(_only(inputs)), self._of_ranks(_only(outputs))
        _of_one_type(output, input_)

        def run(group):
            joined = _room_for(output)
            flow("all_gather_v")(group, _elements(input_.contiguous()), _elements(joined), _counts(output))
            _divide(joined, output)

        return self._begin(run, output, opts or c10d.AllgatherOptions())

    def _allgather_base(self, output, input_, opts=None):
        _of_one_type([_dense(output)], _dense(input_))

        def run(group):
            with _filled(output) as own:
                flow("all_gather")(group, _elements(input_.contiguous()), _elements(own))

        return self._begin(run, [output], opts or c10d.AllgatherOptions())

    def gather(self, outputs, inputs, opts):
        input_, root = _dense(_only(inputs)), opts.rootRank
        output = self._of_ranks(_only(outputs)) if self._rank == root else []
        _alike(output, input_)

        def run(group):
            rows = input_.new_empty((len(output), input_.numel()))
            flow("gather")(group, _elements(input_.contiguous()), _elements(rows), root)
            _divide(rows.view(-1), output)

        return self._begin(run, output, opts)

    def scatter(self, outputs, inputs, opts):
        output, root = _dense(_only(outputs)), opts.rootRank
        input_ = self._of_ranks(_only(inputs)) if self._rank == root else []
        _alike(input_, output)

        def run(group):
            joined = _joined(input_) if input_ else None
            with _filled(output) as own:
                flow("scatter")(group, _elements(joined) if input_ else Buffer(), _elements(own), root)

        return self._begin(run, outputs, opts)

    def reduce_scatter(self, outputs, inputs, opts=None):
        output, input_, opts = _dense(_only(outputs)), self._of_ranks(_only(inputs)), opts or c10d.ReduceScatterOptions()
        _alike([input_[self._rank]], output)
        return self._reduce_scatter(output, lambda: _joined(input_), [part.numel() for part in input_], opts)

    def _reduce_scatter_base(self, output, input_, opts=None):
        _of_one_type([_dense(output)], _dense(input_))
        if input_.numel() != output.numel() * self._size:
            raise ValueError(f"flow: the input must be {self._size} times as long as the output")
        return self._reduce_scatter(output, input_.contiguous, [output.numel()] * self._size, opts or c10d.ReduceScatterOptions())

    def _reduce_scatter(self, output, joined, counts, opts):
        code = _reducible(output, opts.reduceOp)

        def run(group):
            all_ = joined()
            with _filled(output) as own:
                if code is not None:
                    flow("reduce_scatter_v")(group, _elements(all_, code), _elements(own, code), list_of(counts), _op(opts.reduceOp))
                    return
                rows = own.new_empty((self._size, own.numel()))
                unit = _elements(own.new_empty(1)).count
                received = [own.numel() * unit] * self._size
                sent = [count * unit for count in counts]
                flow("all_to_all_v")(group, _elements(all_), list_of(sent), _elements(rows), list_of(received))
                _reduce_rows(opts.reduceOp, rows, own)

        return self._begin(run, [output], opts)

    def alltoall_base(self, output, input_, output_splits, input_splits, opts=None):
        _of_one_type([_dense(output)], _dense(input_))
        received, sent = (self._parts(tensor, splits) for tensor, splits in ((output, output_splits), (input_, input_splits)))

        def run(group):
            with _filled(output) as own:
                flow("all_to_all_v")(group, _elements(input_.contiguous()), list_of(sent), _elements(own), list_of(received))

        return self._begin(run, [output], opts or c10d.AllToAllOptions())

    def alltoall(self, outputs, inputs, opts=None):
        output, input_ = self._of_ranks(outputs), self._of_ranks(inputs)

        def run(group):
            from_, to = _joined(input_), _room_for(output)
            flow("all_to_all_v")(group, _elements(from_), _counts(input_), _elements(to), _counts(output))
            _divide(to, output)

        return self._begin(run, outputs, opts or c10d.AllToAllOptions())

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

    # Of messages.

    def send(self, tensors, to, tag=0):
        tensor = _dense(_only(tensors))

        def run(group, _):
            flow("send")(group, _elements(tensor.contiguous()), to, tag)

        return self._message(run, tensors, ("to", to), tag)

    def recv(self, tensors, source, tag=0):
        tensor = _dense(_only(tensors))

        def run(group, work):
            with _filled(tensor) as own:
                flow("recv")(group, _elements(own), source, tag)
            work.source = source

        return self._message(run, tensors, ("from", source, tag), tag)

    def recv_anysource(self, tensors, tag=0):
        tensor = _dense(_only(tensors))

        def run(group, work):
            source = ctypes.c_size_t()
            with _filled(tensor) as own:
                flow("recv_any")(group, _elements(own), tag, ctypes.byref(source))
            work.source = source.value

        return self._message(run, tensors, ("from any", tag), tag)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """Messages to rank 0 and back, so that rank 0 knows who has not come. If ranks are missing, the group is of no more use."""
        timeout = self._timeout if timeout is None else timeout
        word = torch.zeros(1, dtype=torch.uint8)
        group = _within(self._group, timeout)
        if self._rank != 0:
            try:
                flow("send")(group, _elements(word), 0, ARRIVED)
                flow("recv")(group, _elements(word), 0, PASSED)
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
                flow("recv_any")(_within(self._group, left), _elements(word), ARRIVED, ctypes.byref(source))
            except dist.DistBackendError as error:
                named = sorted(missing)[: None if wait_all_ranks else 1]
                ranks = ("Ranks " if len(named) > 1 else "Rank ") + ", ".join(map(str, named))
                raise dist.DistBackendError(f"{ranks} failed to pass monitoredBarrier in {milliseconds} ms: {error}") from None
            missing.discard(source.value)
        for rank in range(1, self._size):
            flow("send")(self._group, _elements(word), rank, PASSED)

    # How they run.

    def _begin(self, job, results, opts):
        self._check()
        lane = self._lane("collectives")
        work = _Work(self._group, job, list(results), opts.timeout, lane)
        if lane is None or lane is threading.current_thread():  # in a forked process, which has no threads; in a callback
            work.run()
            return work
        lane.operations.put(work)
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward or not opts.asyncOp:
            work.ended.wait()
        if in_backward and work.error is not None:
            raise work.error
        return work

    def _check(self):
        if self._group is None:
            raise dist.DistBackendError("flow: the group was destroyed")

    def _message(self, run, tensors, peer, tag):
        self._check()
        if tag < 0:
            raise ValueError(f"flow: a tag must not be negative: {tag}")
        lane = self._lane(peer, receives=peer[0] != "to")
        work = _Work(self._group, None, list(tensors), NO_TIME, lane)
        work.job = lambda group: run(group, work)
        if lane is None:
            work.run()
        else:
            lane.operations.put(work)
        return work

    def _lane(self, key, receives=False):
        """None in a forked process."""
        if os.getpid() != self._process:
            return None
        with self._lock:
            if key not in self._lanes:
                self._lanes[key] = _Lane(receives)
            return self._lanes[key]

    def _all_reduce_sparse(self, tensor, opts):
        """The sum of everybody's entries."""
        if opts.reduceOp != OPS.SUM:
            raise RuntimeError("unsupported reduction operation: sparse tensors can only be summed up")

        def run(group):
            own = tensor.coalesce()
            entries, of_ranks = torch.tensor([own._nnz()]), torch.zeros(self._size, dtype=torch.int64)
            flow("all_gather")(group, _elements(entries), _elements(of_ranks))

            def gathered(rows):
                all_ = rows.new_empty((int(of_ranks.sum()), *rows.shape[1:]))
                unit = _elements(rows.new_empty((1, *rows.shape[1:]))).count
                flow("all_gather_v")(group, _elements(rows), _elements(all_), list_of([count * unit for count in of_ranks.tolist()]))
                return all_

            indices, values = gathered(own.indices().t().contiguous()), gathered(own.values().contiguous())
            tensor.copy_(torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce())

        return self._begin(run, [tensor], opts)

    def _of_ranks(self, tensors):
        if len(tensors) != self._size:
            raise RuntimeError(f"flow: a tensor for each of {self._size} ranks is expected, not {len(tensors)}")
        _of_one_type([_dense(tensor) for tensor in tensors], tensors[0])
        return tensors

    def _parts(self, tensor, splits):
        """How many elements go to each rank, or come from there."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits and rows % self._size:
            raise RuntimeError(f"flow: {rows} rows cannot be divided among {self._size} ranks")
        splits = list(splits) or [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise RuntimeError(f"flow: splits {splits}: {self._size} numbers are expected, which add up to {rows}")
        unit = _elements(tensor).count // max(rows, 1)
        return [split * unit for split in splits]


def _only(values):
    if len(values) != 1:
        raise RuntimeError(f"flow: one tensor, or list of tensors, is expected, not {len(values)}")
    return values[0]


def _dense(tensor):
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise RuntimeError(
            f"flow: only dense CPU tensors can be communicated here, not {tensor.layout} ones on {tensor.device}"
        )
    return tensor


def _of_one_type(tensors, own):
    for tensor in tensors:
        if tensor.dtype != own.dtype:
            raise TypeError(f"flow: inputs and outputs must have one type, not {tensor.dtype} and {own.dtype}")


def _alike(tensors, own):
    _of_one_type(tensors, own)
    for tensor in tensors:
        if tensor.numel() != own.numel():
            raise ValueError(f"flow: inputs and outputs must have as many elements, not {tensor.numel()} and {own.numel()}")


@contextlib.contextmanager
def _filled(tensor):
    """The tensor, or a contiguous copy that is copied back."""
    own = tensor.contiguous()
    yield own
    if own is not tensor:
        tensor.copy_(own)


def _elements(tensor, code=None):
    """Those of a contiguous tensor. What flow-comm has no type for moves as bytes."""
    code = DTYPES.get(tensor.dtype) if code is None else code
    if code is None:
        return Buffer(tensor.data_ptr(), tensor.numel() * tensor.element_size(), UINT8)
    return Buffer(tensor.data_ptr(), tensor.numel(), code)


def _counts(tensors):
    return list_of([_elements(tensor).count for tensor in tensors])


def _joined(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _room_for(tensors):
    return tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))


def _divide(joined, tensors):
    for part, tensor in zip(joined.split([tensor.numel() for tensor in tensors]), tensors):
        tensor.copy_(part.view(tensor.shape))


def _op(op):
    return next((code for code, known in enumerate(REDUCTIONS) if op == known), None)


def _reducible(tensor, op):
    """The code of the type as which flow-comm can reduce this one, if there is any."""
    if any(op == bitwise for bitwise in BITWISE) and (tensor.is_floating_point() or tensor.is_complex()):
        raise RuntimeError(f"flow: only integers have bitwise reductions, not {tensor.dtype}")
    if _op(op) is None:
        return None
    # Of bytes with and without sign the bits of sums and products are the same.
    if tensor.dtype == torch.int8 and (op == OPS.SUM or op == OPS.PRODUCT):
        return UINT8
    return DTYPES.get(tensor.dtype)


def _reduce_rows(op, rows, result):
    """Reduces the rows, in their order, into one tensor."""
    table = COMBINE_BOOL if rows.dtype == torch.bool else COMBINE
    combine = next((function for known, function in table.items() if op == known), None)
    if combine is None:
        raise RuntimeError(f"flow: this reduction is not supported for {rows.dtype}")
    total = rows[0]
    for row in rows[1:]:
        total = combine(total, row)
    result.copy_(total.view(result.shape))
