"""Trainings that go on when ranks are lost, and when others come."""

import contextlib
import gc
import math
import os
import pickle
import time
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import elastic, extension
from .catch_up import catch_up, copy_of, is_stateful, load_modules, load_state, modules_of, state_of
from .ddp import DistributedDataParallel
from .elastic import LOOK_INTERVAL, MAX_CHANGES

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
    does a rank that comes. The loop repeats the step, as it follows from the state. A process has one Elastic.

    `model`: bare, on CPUs. `elastic.model` is the model in `wrap`, by default in flow_torch.DistributedDataParallel; with each change of the
    ranks it is made anew. `state`: where the program goes on: an object with `state_dict` and `load_state_dict`, or a dictionary of such and of
    values that can be pickled. It is copied in each step. See docs/elastic.md.
    """

    _is_used = False

    def __init__(self, model, optimizer, state, wrap=DistributedDataParallel, timeout=timedelta(minutes=30)):
        """`timeout`: for how long ranks wait for each other.

        Raises TypeError for a state without `state_dict` and an optimizer that is none of PyTorch's class, and ValueError for a model that is
        sharded or not on CPUs, and for optimizers that step in backward, are sharded, or have parameters that are not the model's."""
        if not isinstance(state, dict) and not is_stateful(state):
            raise TypeError(f"flow: the state is a dictionary, or has state_dict() and load_state_dict(): {type(state).__name__} has not")
        if any(type(parameter.data) is not torch.Tensor for parameter in model.parameters()):
            raise ValueError("flow: what a rank alone has is lost with it: Elastic works without FSDP, and other tensors than ordinary ones; InProcessRestart with them")
        if any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()):
            raise ValueError("flow: a step that fails must leave parameters alone: Elastic works without _apply_optimizer_in_backward")
        if any(tensor.device.type != "cpu" for tensor in [*model.parameters(), *model.buffers()]):
            raise ValueError("flow: the model is on another device: Elastic works on CPUs")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"flow: the optimizer is a torch.optim.Optimizer, and not {type(optimizer).__name__}")
        if hasattr(optimizer, "consolidate_state_dict"):
            raise ValueError("flow: what a rank alone has is lost with it: Elastic works without ZeroRedundancyOptimizer")
        if not {parameter for group in optimizer.param_groups for parameter in group["params"]} <= set(model.parameters()):
            raise ValueError("flow: the optimizer has parameters that are not the model's: put them into the model, as ranks send that")
        # The model, wrapped for the ranks that are there.
        self.model = None
        # How often the ranks have changed.
        self.changes = 0
        self._bare = model
        self._optimizer = optimizer
        self._state = state
        self._wrap = wrap
        self._timeout = timeout
        # The steps that the weights have had in this job; -1: this rank has come, and has no weights.
        self._steps = -1 if os.environ.get("FLOW_REPLACEMENT", "0") != "0" else 0
        self._looked = 0
        self._fruitless = 0
        self._losses = 0
        self._buffers = [buffer.detach().clone() for buffer in model.buffers()]
        # What a step that fails has to restore beside buffers, while there is one.
        self._kept = None
        # How many operations had begun when the optimizer's step began.
        self._stepped = None
        # How many operations had begun at the end of the last step.
        self._operations = 0
        # Whether gradients that are there have been in use.
        self._is_used_up = True
        self._hook = None

    def __enter__(self):
        """Joins the others. Raises RuntimeError outside flow-launch --elastic in-place, in a program that has called
        init_process_group, and in one that has had an Elastic: a rank that comes could not tell which one is under way."""
        if "FLOW_REPLACEMENT" not in os.environ:
            raise RuntimeError("flow: Elastic is for workers of flow-launch --elastic in-place")
        if Elastic._is_used:
            raise RuntimeError("flow: this process has had an Elastic: do all steps in one")
        self._change(None)
        Elastic._is_used = True
        self._operations = extension.load().operations()
        self._hook = register_optimizer_step_pre_hook(self._on_optimizer)
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
        """A step: its block calls the model, backward and the optimizer, and changes the state. Gradients are zero at its begin. If a rank
        is lost meanwhile, buffers, gradients, modes of modules, random numbers of torch, the state and the optimizer's options are as before,
        and the block ends without an error. All ranks call this, and whatever communicates is in such a block.

        Yields an object with `is_done`: after the block, whether this rank has done the step.

        Raises TypeError for a state that cannot be sent, RuntimeError for operations outside of such blocks, and those that end after the
        optimizer's step in the block; for gradients that the block before has left, and another optimizer; where weights were changed when a
        rank is lost; after 16 changes of the ranks without a step; and what the block raises."""
        if self._hook is None or self._kept is not None:
            raise RuntimeError("flow: elastic.step() is for a loop in `with elastic:`, and not within another step")
        self._keep()
        step = SimpleNamespace(is_done=False)
        try:
            yield step
            if self._stepped is None and self._is_of_others():
                raise RuntimeError(HIDDEN)
        except Exception as error:
            if not self._is_of_others():
                raise
            self._undo(error)
        else:
            step.is_done = True
            self._finish()
        finally:
            self._kept = None
            self._operations = extension.load().operations()

    def _keep(self):
        if self._operations != extension.load().operations():
            raise RuntimeError("flow: the program communicates between steps, where a change of the ranks ends it: do it in a step's block")
        if not self._is_used_up and self._has_gradients():
            raise RuntimeError("flow: the step before leaves gradients, which would be lost: accumulate in one block, or call zero_grad()")
        self._bare.zero_grad()
        self._keep_buffers()
        options = [{key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups]
        kept = copy_of((state_of(self._state), modules_of(self._bare), options))
        self._kept = kept, torch.get_rng_state(), self._versions()
        self._stepped = None

    def _undo(self, error):
        """Makes all as it was before the step, and goes on with the ranks that are left."""
        values, random_numbers, versions = self._kept
        if self._stepped is not None or versions != self._versions():
            raise RuntimeError(
                "flow: a rank was lost after weights were changed, and the step is half done: communicate before optimizer.step(), and change "
                "weights by that alone"
            ) from error
        state, modules, options = pickle.loads(values)
        load_state(self._state, state)
        load_modules(self._bare, modules)
        del self._optimizer.param_groups[len(options) :]
        for group, own in zip(self._optimizer.param_groups, options):
            group.update(own)
        self._forget_unscaled()
        self._bare.zero_grad()
        torch.set_rng_state(random_numbers)
        self._restore_buffers()
        self._change(error)

    def _finish(self):
        if self._stepped is not None and self._stepped != extension.load().operations():
            raise RuntimeError("flow: the step communicates after optimizer.step(), where a lost rank leaves it half done: do it before that")
        self._steps += 1
        self._fruitless = 0
        self._is_used_up = self._stepped is not None
        if dist.get_rank() == 0 and time.monotonic() >= self._looked + LOOK_INTERVAL:
            self._looked = time.monotonic()
            if elastic.newcomers() > 0:
                self._change(None)

    def _on_optimizer(self, optimizer, *_):
        if optimizer is not self._optimizer:
            raise RuntimeError("flow: another optimizer steps, which Elastic does not send: have one, with groups of parameters")
        if self._kept is None:
            raise RuntimeError("flow: optimizer.step() is called outside of `with elastic.step()`")
        if self._is_of_others():
            raise RuntimeError(HIDDEN)
        if not extension.load().are_all_idle():
            raise RuntimeError("flow: operations are under way at optimizer.step(), and a lost rank leaves the step half done: wait for them")
        if self._stepped is None:
            self._stepped = extension.load().operations()

    def _versions(self):
        """They change with the weights."""
        return [parameter._version for parameter in self._bare.parameters()]

    def _has_gradients(self):
        """Whether a step was left out. Those that GradScaler leaves out have gradients that are not finite."""
        norms = [parameter.grad.norm().item() for parameter in self._bare.parameters() if parameter.grad is not None]
        return 0 < sum(norms) < math.inf

    def _forget_unscaled(self):
        """The state of a GradScaler leaves out whose gradients are unscaled. The program has it wherever it likes."""
        for scaler in gc.get_objects():
            if issubclass(type(scaler), torch.amp.GradScaler):
                scaler._per_optimizer_states.pop(id(self._optimizer), None)

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
                self.model.training = self._bare.training
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
