"""Operations of the part in Python, and the threads that run them."""

import contextlib
import ctypes
import datetime
import functools
import os
import queue
import threading
import time
import weakref

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from . import library, replaced
from .functions import flow, without_result

NO_TIME = datetime.timedelta(0)
# Operations of which flow-comm's has another name: its ranks may have blocks of different lengths.
RENAMED = "all_gather", "reduce_scatter", "all_to_all"


class Group:
    """A flow_group, which is left with its last user."""

    def __init__(self, handle):
        self._as_parameter_ = handle
        # At the end of the process threads may still wait in it.
        weakref.finalize(self, without_result("leave"), handle).atexit = False


def made(function, *arguments):
    handle = ctypes.c_void_p()
    flow(function)(*arguments, ctypes.byref(handle))
    return Group(handle)


def abort(group):
    flow("abort")(group, b"it was interrupted while it waited")


def within(group, timeout):
    """The group for an operation with this timeout, of which 0 and less mean the group's own."""
    return made("with_timeout", group, timeout.total_seconds()) if timeout > NO_TIME else group


def with_label(group, operation, elements):
    """The group for an operation that errors call something else than flow-comm does, or on elements that they do; see `tensors.label`."""
    return made("with_label", group, operation.encode(), elements.encode()) if elements or operation in RENAMED else group


class Stays:
    """Threads that complete futures. While Python ends, it ends each thread that comes to it by unwinding the thread's stack; where C++ code
    is on that, as around callbacks, the process is aborted. So the end of the process waits for them, and later ones sleep for ever."""

    def __init__(self):
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self):
        self._changed, self._count, self._is_over = threading.Condition(), 0, False

    def begin(self):
        """False if it is too late."""
        with self._changed:
            is_too_late = self._is_over and self._count == 0
            self._count += not is_too_late
        return not is_too_late

    def end(self):
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait_for_all(self, is_last):
        """Waits until there is none, at most for a minute. If it is the last wait, none begins afterwards."""
        end = time.monotonic() + 60
        with self._changed:
            self._is_over = is_last
            while self._count > 0 and time.monotonic() < end:
                self._changed.wait(1)


stays = Stays()


class Work(dist.Work):
    """An operation, and how it has ended."""

    def __init__(self, group, job, results, timeout, operation="", elements=""):
        super().__init__()
        self.operation, self.elements = operation, elements
        self.group, self.job, self.results, self._timeout, self.lane = group, job, results, timeout, None
        # Without the event, which a lane gives it, it runs before somebody has it.
        self.error, self.source, self.ended = None, -1, None
        self.over = self.future = None

    def put_into(self, lane):
        self.lane, self.ended, self.process = lane, threading.Event(), os.getpid()
        self._make_future()

    def _make_future(self):
        # The second, as only an error that a callback raises is one for C++ as well.
        self.over = torch.futures.Future()
        self.future = self.over.then(self.outcome)

    def run(self):
        self.run_job()
        self.end()

    def run_job(self):
        had_gradients = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            self.job(with_label(within(self.group, self._timeout), self.operation, self.elements))
        except Exception as error:
            self.error = error
        finally:
            torch.set_grad_enabled(had_gradients)

    def end(self):
        self.job = None
        if self.ended is not None:
            self.ended.set()
            self.over.set_result(None)

    def wait_until_ended(self, timeout=None):
        """Whether it has ended in so many seconds. A signal's handler may raise an exception meanwhile."""
        try:
            return self.ended.wait(timeout)
        except BaseException:
            abort(self.group)
            raise

    def outcome(self, _):
        if self.error is not None:
            raise self.error
        return self.results

    def wait(self, timeout=NO_TIME):
        if self.ended is None:
            if self.error is not None:
                raise self.error
            return True
        if os.getpid() != self.process and not self.ended.is_set():
            raise dist.DistBackendError("flow: this process was forked from a rank, and only there the operation can be waited for")
        if self.lane.is_own():  # a callback
            self.lane.run_up_to(self)
        if not self.wait_until_ended(timeout.total_seconds() if timeout > NO_TIME else None):
            cause = f"an operation, with those before it, has not ended in the {timeout.total_seconds():g} s of its wait()"
            flow("abort")(self.group, cause.encode())
            raise dist.DistBackendError(f"flow: {cause}")
        if self.error is not None:
            raise self.error
        self.future.wait()  # which is completed a little later
        return True

    def get_future(self):
        if self.future is None and self.error is None:
            self.future = torch._C.Future([])
            self.future.set_result(self.results)
        elif self.future is None:
            self._make_future()
            self.over.set_result(None)
        return self.future

    def is_completed(self):
        return self.ended is None or self.future.done()

    def is_success(self):
        return self.is_completed() and self.error is None

    def exception(self):
        return self.error

    def result(self):
        return self.results

    def source_rank(self):
        return self.source

    _source_rank = source_rank

    def synchronize(self):
        self.wait()


class Lane(threading.Thread):
    """Runs operations one after the other."""

    # Those that are in use.
    all = weakref.WeakSet()

    def __init__(self, receives=False):
        super().__init__(name="flow", daemon=True)
        self.receives, self.operations, self.last_ended, self.last_group = receives, queue.SimpleQueue(), None, None
        # Whoever runs an operation has the turn, and meanwhile its group is here.
        self.turn, self.runner, self.running = threading.Lock(), None, None
        self.start()
        Lane.all.add(self)

    def put(self, work):
        work.put_into(self)
        self.last_ended, self.last_group = work.ended, weakref.ref(work.group)
        self.operations.put(work)

    def run_here(self, work):
        """Runs an operation on this thread, after those before it. With a core for each rank that is faster than to hand it to another."""
        if self.is_own():  # in a callback: it is this thread's turn
            return work.run()
        if self.runner == threading.get_ident():
            raise dist.DistBackendError("flow: a signal's handler that comes in an operation cannot begin another one in its group")
        while True:
            self.wait_until_idle()
            self.begin_turn(work)
            try:
                if self.is_idle():
                    return work.run()
            finally:
                self.end_turn()

    def begin_turn(self, work):
        """One thread at a time runs operations, and callbacks in which others may begin."""
        try:
            self.turn.acquire()
        except BaseException:  # of a signal's handler
            self.interrupt()
            raise
        self.runner, self.running = threading.get_ident(), work.group

    def end_turn(self):
        self.runner = self.running = None
        self.turn.release()

    def is_own(self):
        """Whether this thread is the lane's."""
        return self.ident == threading.get_ident()

    def is_idle(self):
        return self.last_ended is None or self.last_ended.is_set()

    def run(self):
        while (work := self.operations.get()) is not None:
            self.begin_turn(work)
            work.run_job()
            self.running = None
            # Before the operation ends: until then a callback that waits for it stays, and so the end of the process waits for this thread.
            is_in_time = stays.begin()
            work.ended.set()
            if not is_in_time:
                threading.Event().wait()
            work.end()
            self.end_turn()
            del work  # and with it, perhaps, the group's last user
            stays.end()

    def run_up_to(self, last):
        while not last.ended.is_set() and (work := self.operations.get()) is not None:
            work.run()

    def close(self):
        """Runs what there is; but receives fail, as nobody may ever send, and one that is under way is left to this thread. Nothing is put
        into it any more."""
        if self.receives:
            self.fail_receives()
        self.operations.put(None)
        if self.receives or self.is_own():
            return
        try:
            self.join()
        except BaseException:  # of a signal's handler
            self.interrupt()
            raise

    def fail_receives(self):
        """Those that are not under way."""
        with contextlib.suppress(queue.Empty):
            while (work := self.operations.get_nowait()) is not None:
                work.error = dist.DistBackendError("flow: the group was destroyed before this message came")
                work.end()

    def wait_until_idle(self):
        try:
            while not self.is_idle():
                self.last_ended.wait()
        except BaseException:  # of a signal's handler
            self.interrupt()
            raise

    def interrupt(self):
        """Has the group fail if an operation is under way."""
        group = self.running if self.is_idle() else self.last_group()
        if group is not None:
            abort(group)


def _interrupt_all():
    for lane in list(Lane.all):
        lane.interrupt()


def _wait_for(future):
    """Waits for a future, which may be an operation's or follow from one. Whoever is interrupted does not know of which group that is: all
    that have operations under way fail."""
    pause = 1e-5
    try:
        while not future.done():
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
    except BaseException:
        _interrupt_all()
        raise


replaced.wait_for_futures(_wait_for)


def _end_all():
    """Does what destroy_process_group would have done, and waits for callbacks that run. Whoever interrupts that has what is under way fail."""
    interruption = None
    for _ in range(2):  # the second time what the callbacks have begun
        try:
            _end_operations()
        except BaseException as error:
            interruption = error
            _interrupt_all()
            _end_operations()
    stays.wait_for_all(is_last=True)
    if interruption is not None:
        raise interruption


def _end_operations():
    """Runs what there is, also what callbacks that run begin meanwhile; then receives fail. The lanes stay: later callbacks may use them."""
    for lane in list(Lane.all):
        if not lane.receives:
            lane.wait_until_idle()
    stays.wait_for_all(is_last=False)
    for lane in list(Lane.all):
        if lane.receives:
            lane.fail_receives()


library.at_end.append(_end_all)


def _keep_notices():
    """DistributedDataParallel hands the operation that Join begins for it to its Reducer, in C++, and keeps no other reference. Without
    one the part of a Work that is Python's is gone."""
    notify, kept = Join.notify_join_context, weakref.WeakKeyDictionary()

    @functools.wraps(notify)
    def keeping(joinable):
        kept[joinable] = work = notify(joinable)
        return work

    Join.notify_join_context = staticmethod(keeping)


_keep_notices()
