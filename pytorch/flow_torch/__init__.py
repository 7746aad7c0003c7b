"""torch.distributed over flow-comm: `init_process_group("flow")`, for tensors on CPUs.

Importing PyTorch registers the backend, by the entry point `torch.backends` of the wheel; importing this module does so without the
wheel. See docs/torch.md.
"""

import datetime
import functools
import inspect
import os

import torch
import torch.distributed as dist

__all__ = ["DistributedDataParallel", "is_shared"]

_CPU = torch.device("cpu")


def _backend(group=None):
    """The backend of a group, if that is flow's."""
    from . import extension

    group = group or dist.distributed_c10d._get_default_group()
    try:
        backend = group._get_backend(_CPU)
    except RuntimeError:  # none for CPUs
        return None
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it.
    backend = getattr(backend, "wrapped_pg", backend)
    return backend if isinstance(backend, extension.load().Backend) else None


def _create(options, _):
    """What init_process_group and new_group call, on the ranks of the group."""
    from . import rendezvous

    world = _backend() if dist.is_initialized() else None
    if world is None:
        return rendezvous.join(options)
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return world.new_group_of(ranks=ranks, key=options.group_id, timeout=options.timeout)


def is_shared(tensor, group=None):
    """Whether collectives of the group use the tensor's memory in place, and copy nothing."""
    backend = _backend(group)
    return backend is not None and backend.is_shared(tensor)


def _replace_gloo():
    """Has programs that ask for gloo, also as a part of `cpu:gloo,cuda:nccl`, get flow."""
    for name in ("init_process_group", "new_group"):
        original = getattr(dist, name)

        @functools.wraps(original)
        def instead(*arguments, original=original, **options):
            call = inspect.signature(original).bind(*arguments, **options)
            given = call.arguments.get("backend")
            if given is not None:
                call.arguments["backend"] = str(given).lower().replace("gloo", "flow")
            return original(*call.args, **call.kwargs)

        _replace(name, instead)


def _monitored_barrier(original):
    """torch's own refuses all but gloo."""

    @functools.wraps(original)
    def barrier(group=None, timeout=None, wait_all_ranks=False):
        if group is dist.GroupMember.NON_GROUP_MEMBER or "flow" not in str(dist.get_backend(group)):
            return original(group, timeout, wait_all_ranks)
        if not isinstance(timeout, (datetime.timedelta, type(None))):
            timeout = datetime.timedelta(seconds=timeout)
        group = group or dist.distributed_c10d._get_default_group()
        return group.monitored_barrier(*(() if timeout is None else (timeout,)), wait_all_ranks=wait_all_ranks)

    return barrier


def _replace(name, function):
    """For programs that find it in torch.distributed."""
    setattr(dist, name, function)
    setattr(dist.distributed_c10d, name, function)


def _autoload():
    """What the entry point calls, at the end of `import torch`."""


if dist.is_available():
    from .ddp import DistributedDataParallel

if dist.is_available() and not hasattr(dist.Backend, "FLOW"):
    dist.Backend.register_backend("flow", _create, extended_api=True, devices=["cpu"])
    _replace("monitored_barrier", _monitored_barrier(dist.monitored_barrier))
    if os.environ.get("FLOW_TORCH") == "1":
        _replace_gloo()
