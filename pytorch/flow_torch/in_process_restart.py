"""Trainings that begin again from a checkpoint, in the same processes, when the ranks have changed."""

import gc
import logging
import os
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from . import bindings, elastic, extension
from .elastic import LOOK_INTERVAL, MAX_CHANGES

# How PyTorch calls the threads of torch.distributed.checkpoint.async_save.
SAVES = "AsyncCheckpointExecutor"

_logger = logging.getLogger(__name__)


class InProcessRestart:
    """A training that begins again in the same processes when a rank is lost, or when one comes. For models whose parts no other rank has, as with
    FSDP2. It goes on from a checkpoint, in flow-launch's memory say. For jobs of
    flow-launch --elastic in-place:

        def train(attempt):
            model = fully_shard(Network())
            ...
            if path := latest("checkpoints"):
                dcp.load(state, checkpoint_id=path, storage_reader=InMemoryReader(path))
            while step < steps:
                attempt.check()
                ...

        flow_torch.InProcessRestart().run(train)

    See docs/elastic.md.
    """

    def __init__(self, timeout=timedelta(minutes=30)):
        """`timeout`: for how long ranks wait for each other."""
        self._timeout = timeout

    def run(self, train):
        """Calls `train(attempt)`, and again each time the ranks have changed, until it has returned on all of them. Returns what it has returned.
        All ranks call this, in place of init_process_group. `train` makes all anew, with the default group that is there then: meshes, the
        model, the optimizer. It loads the last checkpoint, calls `attempt.check()` before each step, and passes errors on.

        Raises RuntimeError outside flow-launch --elastic in-place, in a program that has called init_process_group, and where the ranks have
        changed 16 times without two calls of `check`; and other errors of `train`. After an error the process is to end: the other ranks wait
        for its end, and go on."""
        if "FLOW_REPLACEMENT" not in os.environ:
            raise RuntimeError("flow: InProcessRestart is for workers of flow-launch --elastic in-place")
        changes = 0
        while True:
            elastic.reconfigure(self._timeout)
            attempt = Attempt()
            try:
                result = train(attempt)
                # A rank that has not done the last step needs the others.
                dist.barrier()
                return result
            # Those of torch.distributed.checkpoint are no `Exception`.
            except BaseException as error:
                if isinstance(error, (KeyboardInterrupt, SystemExit)):
                    raise
                changes = 0 if attempt.checks > 1 else changes + 1
                self._check_change(attempt, changes, error)
            self._end_saves()
            # What the error has kept of the model.
            gc.collect()

    def _check_change(self, attempt, changes, error):
        """Raises the error if no change of the ranks has caused it."""
        if not attempt.is_over():
            raise error
        if not dist.is_initialized():
            raise RuntimeError("flow: the ranks change, and train() has destroyed the default group: leave it to run()") from error
        if changes >= MAX_CHANGES:
            reason = f"the ranks have changed {MAX_CHANGES} times, and attempt.check() was not called twice in between"
            raise RuntimeError(f"flow: {reason}") from error
        is_known = isinstance(error, (dist.DistError, Newcomers))
        _logger.log(logging.INFO if is_known else logging.WARNING, "flow: rank %s: the ranks change: %s", os.environ["RANK"], error)

    def _end_saves(self):
        """Waits for threads that save: their next operation would be in the next default group."""
        bindings.find_backend(dist.group.WORLD).fail("the ranks change")
        end = time.monotonic() + self._timeout.total_seconds()
        for thread in threading.enumerate():
            if thread.name.startswith(SAVES):
                thread.join(max(0, end - time.monotonic()))
                if thread.is_alive():
                    raise RuntimeError("flow: a checkpoint is still being saved after the ranks have changed")


class Newcomers(RuntimeError):
    """Others wait to join."""


class Attempt:
    """A training while its ranks stay the same."""

    def __init__(self):
        self.checks = 0
        self._losses = extension.load().losses()
        self._looked = 0
        self._has_newcomers = False

    def check(self):
        """Raises an error on rank 0 when a process waits to join, for `run`. All ranks call this before each step: by that `run` knows that the
        training goes on. It sends nothing. The other ranks hear of the change by their next operation."""
        self.checks += 1
        if dist.get_rank() == 0 and time.monotonic() >= self._looked + LOOK_INTERVAL:
            self._looked = time.monotonic()
            if elastic.newcomers() > 0:
                self._has_newcomers = True
                raise Newcomers("others wait to join")

    def is_over(self):
        """Whether the ranks change: errors may come to the program as something else."""
        return self._has_newcomers or extension.load().losses() > self._losses
