"""What the C++ part does, as Python calls it."""

import ctypes
import re
import secrets
from typing import NamedTuple

import torch
import torch.distributed as dist

from . import extension

_CPU = torch.device("cpu")


def join(place, name, timeout):
    """The group of the ranks that join under this name. `place`: which of them this is; None: the environment says so."""
    where = dict(place or {})
    address, token = where.pop("address", ""), where.pop("token", "")
    numbers = [where[key] for key in ("rank", "world_size", "local_rank", "local_world_size", "node")] if place else None
    return dist.ProcessGroup.unbox(extension.load().join(numbers, address, token, name, timeout.total_seconds()))


def keep_store(group, store):
    """The same group: in this store those meet that follow from it."""
    extension.load().keep_store(group.boxed(), dist.ProcessGroup(store, 0, 1).boxed())
    return group


def reconfigurable(store, rank, size, timeout):
    """A group without ranks, until `reconfigure` gives it some, who meet in the store."""
    place, handle = dist.ProcessGroup(store, rank, size).boxed(), f"flow-{secrets.token_hex(8)}"
    return dist.ProcessGroup.unbox(extension.load().reconfigurable(place, handle, timeout.total_seconds()))


def reconfigure(before, timeout):
    """The job's group of the ranks that are left and of those that were started again. `before`: the one before, whose ranks are gone then;
    None at the start of this process."""
    group = None if before is None else find_backend(before).group
    return dist.ProcessGroup.unbox(extension.load().reconfigure(group, timeout.total_seconds()))


class Backend:
    """flow's backend of a process group."""

    def __init__(self, group):
        self.group = group.boxed()
        self._backend = group._get_backend(_CPU)

    def new_group_of(self, ranks, timeout, store):
        """A group of these ranks, which all of them make."""
        return keep_store(dist.ProcessGroup.unbox(extension.load().new_group_of(self.group, ranks, timeout.total_seconds())), store)

    def newcomers(self):
        """How many processes wait to join the job."""
        return extension.load().newcomers(self.group)

    def is_shared(self, tensor):
        return extension.load().is_shared(self.group, tensor)

    def allocate_tensor(self, *arguments, **options):
        """A tensor in shared memory, if there is room."""
        return self._backend.allocate_tensor(*arguments, **options)

    def fail(self, cause):
        """Makes the group unusable, on all ranks."""
        extension.load().fail(self.group, cause)


def find_backend(group):
    """The group's, if it has one of the C++ part's."""
    if not extension.is_loaded():
        return None
    group = _unwrapped(group)
    return Backend(group) if extension.load().is_flow(group.boxed()) else None


def _unwrapped(group):
    """The group without what TORCH_DISTRIBUTED_DEBUG=DETAIL wraps its backend in."""
    has_cpu = _CPU in group._device_types
    wrapped = getattr(group._get_backend(_CPU), "wrapped_pg", None) if has_cpu else None
    if wrapped is None:
        return group
    made = dist.ProcessGroup(group.rank(), group.size())
    made._register_backend(_CPU, dist.ProcessGroup.BackendType.CUSTOM, wrapped)
    return made


class BucketStats(NamedTuple):
    """One bucket in the last backward: see docs/torch.md."""

    bytes: int
    parameters: list
    in_place: int
    ready_at: float
    ready_to_done: float
    behind_backward: float


class Stats(NamedTuple):
    """The last backward that reduced gradients in place: see docs/torch.md."""

    backwards: int
    buckets: list
    backward: float
    exposed: float

    def hidden(self):
        """The share of the reductions' time during which backward still ran: 0 to 1."""
        total = sum(bucket.ready_to_done for bucket in self.buckets)
        return sum(bucket.behind_backward for bucket in self.buckets) / total if total else 1.0


class InPlaceReducer:
    """Reduces gradients where they are, beside torch's Reducer."""

    def __init__(self, backend, reducer, names):
        flow = extension.load()
        self._own = torch.classes.flow.InPlaceReducer(backend.group, id(reducer), _address(reducer, flow.reducer_type()), names)
        self._address = self._own.address()
        self._check_finished, self._expect = flow.check_finished.default, flow.expect.default

    def __getattr__(self, name):
        if name == "_own":  # the constructor has failed
            raise AttributeError(name)
        return getattr(self._own, name)

    # The compiler would call operators as it traces a forward.
    @torch._disable_dynamo
    def check_finished(self):
        """An error if the last backward has failed, or has not brought all gradients."""
        self._check_finished(self._address)

    @torch._disable_dynamo
    def expect(self, is_uneven, counts_ranks):
        """Takes over the backward for which torch's Reducer has been prepared."""
        self._expect(self._address, is_uneven, counts_ranks)

    def sum_in(self, backend):
        """Sums up gradients among another group's ranks from here on, or not at all."""
        self._own.sum_in(None if backend is None else backend.group)

    def stats(self):
        backwards, buckets, backward, exposed = self._own.stats()
        return Stats(backwards, [BucketStats(*bucket) for bucket in buckets], backward, exposed)


def _address(instance, cpp_type):
    """Where an object of PyTorch's C++ lies, of the type whose std::type_info lies at `cpp_type`."""
    python = ctypes.PyDLL(None)
    new, pointer, interpreter, state = (
        getattr(python, name)
        for name in ("PyCapsule_New", "PyCapsule_GetPointer", "PyInterpreterState_Get", "PyInterpreterState_GetDict")
    )
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    interpreter.restype = ctypes.c_void_p
    state.restype, state.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    type_info = new(cpp_type, b"St9type_info", None)
    # pybind11's that have made objects in this process: PyTorch's may be one of several.
    known = ctypes.cast(state(interpreter()), ctypes.py_object).value
    found = [re.fullmatch(r"__pybind11_internals_v\d+_(.*)__", str(key)) for key in known]
    for match in filter(None, found):
        capsule = instance._pybind11_conduit_v1_(match[1].encode(), type_info, b"raw_pointer_ephemeral")
        if capsule is not None:
            return pointer(capsule, b"N4c10d7ReducerE")
    raise NotImplementedError(f"flow_torch: gradients are copied, as PyTorch {torch.__version__} does not say where its Reducer is")
