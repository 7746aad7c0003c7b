"""Meshes from before the ranks have changed differ from later ones. PyTorch keeps what it has found out for a mesh, as where this rank's shards are,
for all meshes that are equal: of the same ranks. But this process may have another rank in the next one.
"""

from torch.distributed.device_mesh import DeviceMesh

# How often the ranks have changed.
_changes = [0]
_original = []


def ranks_have_changed():
    """Meshes that are made from now on differ from those before."""
    if not _original:
        _original.extend([DeviceMesh.__init__, DeviceMesh.__eq__])
        DeviceMesh.__init__ = _init
        DeviceMesh.__eq__ = _eq
    _changes[0] += 1


def _init(mesh, *arguments, **options):
    mesh._flow_changes = _changes[0]
    _original[0](mesh, *arguments, **options)


def _eq(mesh, other):
    if mesh is other:
        return True
    return _original[1](mesh, other) and getattr(mesh, "_flow_changes", 0) == getattr(other, "_flow_changes", 0)
