"""Functions of PyTorch's that refuse what is not its own, that FLOW_TORCH=1 changes, or that would wait for what is left for later."""

import datetime
import functools
import inspect
import os
import sys
import threading
import warnings

import torch
import torch.distributed as dist

_making = threading.local()


def install(backend_of):
    """`backend_of`: flow's backend of a group, if it has one."""
    _replace("monitored_barrier", _monitored_barrier, backend_of)
    _replace("split_group", _split_group, backend_of)
    _replace("shrink_group", _shrink_group, backend_of)
    # These are not in each version of PyTorch.
    _replace("_set_pg_timeout", _set_pg_timeout, backend_of)
    _replace("_maybe_attach_flight_recorder", _maybe_attach_flight_recorder)
    if not _replace("_new_process_group_helper", _new_process_group_helper) and replaces_gloo():
        warnings.warn(f"FLOW_TORCH=1 has no effect: flow_torch does not know how PyTorch {torch.__version__} makes groups")


def replaces_gloo():
    return os.environ.get("FLOW_TORCH") == "1"


def is_mixed():
    """Whether the group that is being made has other backends beside flow."""
    return getattr(_making, "is_mixed", False)


def _replace(name, replacement, *arguments):
    """Whether there is such a function."""
    original = getattr(dist.distributed_c10d, name, None)
    if original is None:
        return False
    function = functools.wraps(original)(replacement(original, *arguments))
    for module in (dist, dist.distributed_c10d):
        if hasattr(module, name):
            setattr(module, name, function)
    return True


def _new_process_group_helper(original):
    """Makes all groups, whatever a program has called for it."""
    signature = inspect.signature(original)

    def helper(*arguments, **options):
        call = signature.bind(*arguments, **options)
        if replaces_gloo():
            call.arguments["backend"] = _with_flow(call.arguments["backend"])
        _making.is_mixed = "," in str(call.arguments["backend"])
        try:
            return original(*call.args, **call.kwargs)
        except BaseException:
            # A group's keys in the store have its number. The number of a first group that was not made, in an attempt that other
            # ranks perhaps did not make, is free again.
            if not call.arguments["global_ranks_in_group"]:
                dist.distributed_c10d._world.group_count = 0
            raise

    return helper


def _with_flow(backend):
    """The same, with flow for what gloo does on CPUs."""
    devices = dist.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    if devices.get("cpu") != "gloo":
        return backend
    others = {device: name for device, name in devices.items() if device != "cpu" and (name != "gloo" or _is_available(device))}
    if not others:
        return dist.Backend("flow")
    return dist.Backend(",".join(f"{device}:{name}" for device, name in {"cpu": "flow", **others}.items()))


def _is_available(device):
    return getattr(torch, device).is_available()


def _set_pg_timeout(original, backend_of):
    """torch's own knows gloo's and NCCL's only."""

    def set_timeout(timeout, group=None):
        if group is dist.GroupMember.NON_GROUP_MEMBER or backend_of(group) is None:
            return original(timeout, group)
        (group or dist.distributed_c10d._get_default_group()).set_timeout(timeout)

    return set_timeout


def _maybe_attach_flight_recorder(original):
    """Since PyTorch 2.15. Its recorder cannot record groups that are Python's."""

    def attach(group, *arguments):
        if not hasattr(group, "new_group_of"):
            original(group, *arguments)

    return attach


def wait_for_futures(wait_for, complete_deferred=None):
    """Makes a wait for a future end when a signal's handler raises an exception, as torch's own does not: `wait_for` waits so. And a hook in
    backward that waits first completes those that are left to the end of backward, if there are such."""
    original = torch._C.Future.wait

    @functools.wraps(original)
    def wait(future):
        # Also for a future that is complete: which are does not depend on when ranks come here.
        if complete_deferred is not None and torch._C._current_graph_task_id() != -1:
            complete_deferred()
        if threading.current_thread() is threading.main_thread():  # which handles signals
            wait_for(future)
        return original(future)

    torch._C.Future.wait = wait


def shorten_all_reduce(at_once):
    """Of a small tensor's all-reduce most is what PyTorch does around it. `at_once` does a plain one without that: whether it has."""
    _replace("all_reduce", _all_reduce, at_once)
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None:  # PyTorch's compiler knows the function by this
        remaps = functional.traceable_collective_remaps
        remaps[dist.all_reduce] = remaps[dist.all_reduce.__wrapped__]


def _all_reduce(original, at_once):
    c10d = dist.distributed_c10d
    sum_ = dist.ReduceOp.SUM
    profiler = torch.autograd.profiler
    count_modes, count_dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack

    def all_reduce(tensor, op=sum_, group=None, async_op=False):
        is_plain = type(tensor) is torch.Tensor and op is sum_ and not async_op
        # Profilers and modes look at what PyTorch does.
        if is_plain and not count_modes() and not count_dispatch_modes() and not profiler._is_profiler_enabled:
            name = c10d._pg_names.get(c10d.GroupMember.WORLD if group is None else group)
            if name is not None and not c10d._world.pg_coalesce_state and at_once(tensor, name):
                return None
        return original(tensor, op, group, async_op)

    return all_reduce


def _monitored_barrier(original, backend_of):
    """torch's own refuses all but gloo."""

    def barrier(group=None, timeout=None, wait_all_ranks=False):
        if group is dist.GroupMember.NON_GROUP_MEMBER or backend_of(group) is None:
            return original(group, timeout, wait_all_ranks)
        if not isinstance(timeout, (datetime.timedelta, type(None))):
            timeout = datetime.timedelta(seconds=timeout)
        group = group or dist.distributed_c10d._get_default_group()
        return group.monitored_barrier(*(() if timeout is None else (timeout,)), wait_all_ranks=wait_all_ranks)

    return barrier


def _shrink_group(original, backend_of):
    """torch's own, up to 2.15, keeps wrong ranks of the new group: it looks for the excluded ranks, which are the group's, among those of the
    world. The ranks of a new world are no longer those of the one before. And it takes the new backend for gloo's, as which PyTorch's DDP
    then uses it."""

    def shrink_group(ranks_to_exclude, group=None, *arguments, **options):
        is_world = group in (None, dist.distributed_c10d._get_default_group())
        members = dist.get_process_group_ranks(group)
        made = original(ranks_to_exclude, group, *arguments, **options)
        if backend_of(made) is not None:
            custom = dist.ProcessGroup.BackendType.CUSTOM
            made._register_backend(torch.device("cpu"), custom, made._get_backend(torch.device("cpu")))
            made._set_default_backend(custom)
            left = [member for rank, member in enumerate(members) if rank not in ranks_to_exclude]
            ranks = range(len(left)) if is_world else left
            dist.distributed_c10d._world.pg_group_ranks[made] = {member: rank for rank, member in enumerate(ranks)}
        return made

    return shrink_group


def _split_group(original, backend_of):
    """torch's own is for GPUs."""

    def split_group(parent_pg=None, split_ranks=None, timeout=None, pg_options=None, group_desc=None):
        parent = parent_pg or dist.distributed_c10d._get_default_group()
        if getattr(parent, "bound_device_id", None) is not None or backend_of(parent) is None:
            return original(parent_pg, split_ranks, timeout, pg_options, group_desc)
        size, rank = dist.get_world_size(parent), dist.get_rank(parent)
        listed = [member for ranks in split_ranks or [] for member in ranks]
        if not listed or not all(split_ranks) or len(set(listed)) < len(listed) or not set(listed) <= set(range(size)):
            raise ValueError(f"split_ranks are lists of different ranks from 0 to {size - 1}, none of them empty, not {split_ranks}")
        own = next((sorted(ranks) for ranks in split_ranks if rank in ranks), None)
        if own is None:
            return None
        members = [dist.get_global_rank(parent, member) for member in own]
        return dist.new_group(members, timeout, dist.get_backend(parent), use_local_synchronization=True, group_desc=group_desc)

    return split_group
