"""Meshes from before the ranks have changed are not equal to later ones.

PyTorch keeps what it has computed for a mesh, such as which shard this rank has, and takes that for each mesh that is equal. To PyTorch, meshes
of the same ranks are. But this process may have another rank in the next one.
"""

import functools

from torch.distributed.device_mesh import DeviceMesh

# How often the ranks have changed.
_changes = [0]


def ranks_have_changed():
    """Meshes that are made from now on are not equal to those before."""
    if not _changes[0]:
        _install()
    _changes[0] += 1


def _install():
    make = DeviceMesh.__init__
    is_equal = DeviceMesh.__eq__
    load = DeviceMesh.__setstate__

    # PyTorch has a parameter `mesh`, and programs call it by its name.
    @functools.wraps(make)
    def __init__(self, /, *arguments, **options):
        self._flow_changes = _changes[0]
        make(self, *arguments, **options)

    @functools.wraps(is_equal)
    def __eq__(self, other, /):
        if self is other:
            return True
        return is_equal(self, other) and getattr(self, "_flow_changes", 0) == getattr(other, "_flow_changes", 0)

    @functools.wraps(load)
    def __setstate__(self, state, /):
        load(self, state)
        # Another process may have counted other changes.
        self._flow_changes = _changes[0]

    DeviceMesh.__init__ = __init__
    DeviceMesh.__eq__ = __eq__
    DeviceMesh.__setstate__ = __setstate__
