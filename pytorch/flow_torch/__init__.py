"""torch.distributed over flow-comm: `init_process_group("flow")`, for tensors on CPUs.

Importing PyTorch registers the backend, by the entry point `torch.backends` of the wheel; importing this module does so without the
wheel. See docs/torch.md.
"""

import warnings


def _autoload():
    """Runs at the end of `import torch`, by the entry point. The next line may be that import, so this must exist already."""


import torch
import torch.distributed as dist

__all__ = [
    "DiLoCo",
    "DistributedDataParallel",
    "Elastic",
    "InProcessRestart",
    "SyncBatchNorm",
    "is_shared",
    "newcomers",
    "reconfigure",
]

_CPU = torch.device("cpu")


def _backend(group=None):
    """The backend of a group, if that is flow's."""
    group = group or dist.distributed_c10d._get_default_group()
    if hasattr(group, "new_group_of"):  # the one in Python is the group
        return group
    from . import bindings

    return bindings.find_backend(group)


def _create(options, _):
    """Makes a group, on its ranks: init_process_group and new_group call this."""
    from . import bindings, elastic, rendezvous

    if getattr(options, "enable_reconfigure", False):  # since PyTorch 2.14
        return bindings.reconfigurable(options.store, options.group_rank, options.group_size, options.timeout)._get_backend(_CPU)
    if elastic.made() is not None:
        return bindings.keep_store(elastic.made(), options.store)._get_backend(_CPU)
    world = _backend() if dist.is_initialized() else None
    is_mixed = replaced.is_mixed()
    if world is not None and not (is_mixed and isinstance(world, dist.ProcessGroup)):
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        return world.new_group_of(ranks, options.timeout, options.store)._get_backend(_CPU)
    try:
        # In Python a group cannot have other backends as well.
        return rendezvous.join(options, None if is_mixed else _join_in_python)._get_backend(_CPU)
    except ImportError as error:
        if not replaced.replaces_gloo():
            raise
        if options.group_rank == 0:
            warnings.warn(f"FLOW_TORCH=1 has no effect, gloo is used: {error}")
        return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)


def _join_in_python(place, name, timeout):
    # They change torch.distributed, and torch's operators, so that they are not imported before they are needed.
    from . import extension, fallback, operators

    # Where other ranks lack the C++ part, this one may have it, with its operators.
    if not extension.is_loaded():
        operators.install_without_cpp()
    return fallback.join(place, name, timeout)


def is_shared(tensor, group=None):
    """Whether collectives of the group use the tensor's memory in place, and copy nothing."""
    backend = _backend(group)
    return backend is not None and backend.is_shared(tensor)


# The launcher's wheel has this package beside any PyTorch.
_is_supported = dist.is_available() and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)

if _is_supported:
    # What a program registers later, to run at its end, runs before what this module has registered.
    from . import library
    from .batchnorm import SyncBatchNorm
    from .ddp import DistributedDataParallel
    from .diloco import DiLoCo
    from .elastic import newcomers, reconfigure
    from .in_process_restart import InProcessRestart
    from .training import Elastic

if _is_supported and not hasattr(dist.Backend, "FLOW"):
    from . import complex_numbers, replaced

    dist.Backend.register_backend("flow", _create, extended_api=True, devices=["cpu"])
    replaced.install(_backend)
    complex_numbers.install()
