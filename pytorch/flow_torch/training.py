"""Trainings that go on when ranks are lost, and when others come."""

import contextlib
import os
import pickle
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from . import elastic, extension
from .catch_up import catch_up, is_stateful, load_state, state_of
from .ddp import DistributedDataParallel

# The interval, in seconds, at which rank 0 looks whether somebody waits to join.
LOOK_INTERVAL = 0.1
# After so many changes in which no step is done, the cause is none of the ranks.
MAX_CHANGES = 16
HIDDEN = "flow: a rank is lost, and the block of the step has hidden the error"


class Elastic:
    """A training whose ranks may change while it runs, in jobs of flow-launch --elastic in-place:

        with flow_torch.Elastic(model, optimizer, state) as elastic:
            while state["step"] < steps:
                with elastic.step():
                    cross_entropy(elastic.model(images(state["step"])), labels(state["step"])).backward()
                    optimizer.step()
                    state["step"] += 1

    A step is done on all ranks or not at all. When a rank is lost, the others undo what they have done of the step, leave the block of
    `step()` without an error, and go on with the weights, the optimizer's state and the program's of the rank that has done most steps. So
    does a rank that comes. The loop repeats the step, as it follows from the state.

    `model`: bare, on CPUs. `elastic.model` is the model in `wrap`, by default in flow_torch.DistributedDataParallel; with each change of the
    ranks it is made anew. `state`: where the program goes on: an object with `state_dict` and `load_state_dict`, or a dictionary of such and of
    values that can be pickled. It is copied in each step. See docs/elastic.md.
    """

    def __init__(self, model, optimizer, state, wrap=DistributedDataParallel, timeout=timedelta(minutes=30)):
        """`timeout`: for how long ranks wait for each other.

        Raises TypeError for a state without `state_dict`, and ValueError for sharded parameters and optimizers that step in backward."""
        if not isinstance(state, dict) and not is_stateful(state):
            raise TypeError(f"flow: the state is a dictionary, or has state_dict() and load_state_dict(): {type(state).__name__} has not")
        if any(type(parameter.data) is not torch.Tensor for parameter in model.parameters()):
            raise ValueError("flow: what a rank alone has is lost with it: Elastic works without FSDP, and other tensors than ordinary ones")
        if any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()):
            raise ValueError("flow: a step that fails must leave parameters alone: Elastic works without _apply_optimizer_in_backward")
        # The model, wrapped for the ranks that are there.
        self.model = None
        # How often the ranks have changed.
        self.changes = 0
        self._bare, self._optimizer, self._state, self._wrap, self._timeout = model, optimizer, state, wrap, timeout
        # The steps that the weights have had in this job; -1: this rank has come, and has no weights.
        self._steps = -1 if os.environ.get("FLOW_REPLACEMENT", "0") != "0" else 0
        self._looked = self._fruitless = self._losses = 0
        self._buffers = [buffer.detach().clone() for buffer in model.buffers()]
        # What a step that fails has to restore beside buffers, while there is one.
        self._kept = None
        # How many operations had begun when the optimizer's step began.
        self._stepped = None
        self._hook = None

    def __enter__(self):
        """Joins the others. Raises RuntimeError outside flow-launch --elastic in-place, and in a program that has called
        init_process_group."""
        if "FLOW_REPLACEMENT" not in os.environ:
            raise RuntimeError("flow: Elastic is for workers of flow-launch --elastic in-place")
        self._change(None)
        self._hook = self._optimizer.register_step_pre_hook(self._on_optimizer)
        return self

    def __exit__(self, kind, error, trace):
        """Waits for the others: a rank that has not done the last step needs them."""
        self._hook.remove()
        self._hook = None
        while kind is None:
            try:
                dist.barrier()
                break
            except Exception as loss:
                if not self._is_of_others():
                    raise
                self._change(loss)

    @contextlib.contextmanager
    def step(self):
        """A step: its block calls the model, backward and the optimizer, and changes the state. Gradients are zero at its begin. If a rank is lost meanwhile, buffers, gradients, random numbers of torch, the state and the optimizer's options are as before,
        and the block ends without an error. All ranks call this, and whatever communicates is in such a block.

        Raises RuntimeError for operations that follow the optimizer's step in the block; ranks that change so many times without a step; and
        what the block raises."""
        if self._hook is None or self._kept is not None:
            raise RuntimeError("flow: elastic.step() is for a loop in `with elastic:`, and not within another step")
        self._keep()
        try:
            yield
            if self._stepped is None and self._is_of_others():
                raise RuntimeError(HIDDEN)
        except Exception as error:
            if not self._is_of_others():
                raise
            self._undo(error)
        else:
            self._finish()
        finally:
            self._kept = None

    def _keep(self):
        self._optimizer.zero_grad()
        self._keep_buffers()
        options = [{key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups]
        try:
            self._kept = pickle.dumps((state_of(self._state), options)), torch.get_rng_state()
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise TypeError(f"flow: the state cannot be sent: {error}") from error
        self._stepped = None

    def _undo(self, error):
        """Makes all as it was before the step, and goes on with the ranks that are left."""
        if self._stepped is not None:
            raise RuntimeError("flow: a rank was lost after optimizer.step(), and the step is half done: communicate before it") from error
        values, random_numbers = self._kept
        state, options = pickle.loads(values)
        load_state(self._state, state)
        for group, own in zip(self._optimizer.param_groups, options):
            group.update(own)
        self._optimizer.zero_grad()
        torch.set_rng_state(random_numbers)
        self._restore_buffers()
        self._change(error)

    def _finish(self):
        if self._stepped is not None and self._stepped != extension.load().operations():
            raise RuntimeError("flow: the step communicates after optimizer.step(), where a lost rank leaves it half done: do it before that")
        self._steps += 1
        self._fruitless = 0
        if dist.get_rank() == 0 and time.monotonic() >= self._looked + LOOK_INTERVAL:
            self._looked = time.monotonic()
            if elastic.newcomers() > 0:
                self._change(None)

    def _on_optimizer(self, *_):
        if self._kept is None:
            raise RuntimeError("flow: optimizer.step() is called outside of `with elastic.step()`")
        if self._is_of_others():
            raise RuntimeError(HIDDEN)
        if self._stepped is None:
            self._stepped = extension.load().operations()

    def _change(self, error):
        """From one group of ranks to the next, of which all have the same state."""
        while True:
            self._fruitless += 1
            if self._fruitless > MAX_CHANGES:
                raise RuntimeError(f"flow: the ranks have changed {MAX_CHANGES} times without a step") from error
            self._unwrap()
            elastic.reconfigure(self._timeout)
            self.changes += 1
            self._losses = extension.load().losses()
            self._keep_buffers()
            try:
                self._steps = catch_up(self._steps, self._bare, self._optimizer, self._state)
                self._keep_buffers()
                self.model = self._wrap(self._bare)
                return
            except Exception as loss:
                self._restore_buffers()
                if not self._is_of_others():
                    raise
                error = loss

    def _unwrap(self):
        """Whoever has kept the wrapped model, an error's traceback say, keeps no hooks of it on parameters."""
        before, self.model = self.model, None
        if before is None or before is self._bare:
            return
        for module in before.modules():
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                module._remove_autograd_hooks()
        before.register_forward_pre_hook(_refuse)

    def _is_of_others(self):
        """Whether these ranks have lost one, or another one has left them. Errors may come to the program as something else."""
        return extension.load().losses() > self._losses

    def _keep_buffers(self):
        if self._buffers:
            torch._foreach_copy_(self._buffers, list(self._bare.buffers()))

    def _restore_buffers(self):
        if self._buffers:
            torch._foreach_copy_(list(self._bare.buffers()), self._buffers)


def _refuse(*_):
    raise RuntimeError("flow: the ranks of this model have changed: take elastic.model in each step")
