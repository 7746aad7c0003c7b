"""Buckets of DistributedDataParallel in shared memory, where the part in Python reduces them in place."""

import contextlib
import ctypes
import functools

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# Smaller ones are cheaper to copy than to have a block of their own.
MIN_SHARED = 64 << 10
# Of malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class InSharedMemory(TorchDispatchMode):
    """Gives large tensors without contents shared memory of a group, if there is room."""

    def __init__(self, group):
        super().__init__()
        self._group = group

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        if function is torch.ops.aten.empty.memory_format and options.get("device", torch.device("cpu")).type == "cpu":
            (length, *others), dtype = arguments[0], options.get("dtype") or torch.get_default_dtype()
            shared = None if others or length * dtype.itemsize < MIN_SHARED else self._group.empty_shared(length, dtype)
            if shared is not None:
                keep_freed_memory()
                return shared
        return function(*arguments, **options)


@functools.cache
def keep_freed_memory():
    """Has the C library keep what is freed for what is allocated next. Each step frees its gradients: else the next one gets new pages for
    them, whose zeros take longer than the copies between gradients and buckets. Blocks above the second number, its largest, are returned."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # glibc's
        library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        library.mallopt(M_MMAP_THRESHOLD, 32 << 20)


class Reducer(dist.Reducer):
    """DistributedDataParallel's. It allocates its buckets when it is made and, if it can, once more when it knows the order of gradients."""

    def __init__(self, *arguments, **options):
        group = options["process_group"] if "process_group" in options else arguments[3]
        # Of another backend's group there is nothing to do.
        self._has_rebuilt = not hasattr(group, "empty_shared")
        self._memory = contextlib.nullcontext() if self._has_rebuilt else InSharedMemory(group)
        with self._memory:
            super().__init__(*arguments, **options)

    def _rebuild_buckets(self):
        with contextlib.nullcontext() if self._has_rebuilt else self._memory:
            has_rebuilt = super()._rebuild_buckets()
        self._has_rebuilt |= has_rebuilt
        return has_rebuilt
