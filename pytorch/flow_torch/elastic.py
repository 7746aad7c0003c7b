"""Jobs of flow-launch --elastic in-place: the ranks go on without one that has ended, and take in the one that is started for it."""

import functools
import os
import secrets
import sys
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from . import bindings, extension, meshes

# The interval, in seconds, at which rank 0 looks whether somebody waits to join.
LOOK_INTERVAL = 0.1
# After so many changes in which no step is done, the cause is none of the ranks.
MAX_CHANGES = 16

# The group for which init_process_group is being called.
_made = []
# The last group of the job, until it is the default group.
_last = []
# The default group that `reconfigure` has made, by a weak reference.
_default = []
# The program's sys.excepthook, around which each init_process_group sets one that names the rank.
_hook = []


def reconfigure(timeout=timedelta(minutes=30)):
    """Makes torch.distributed's default group of the job's ranks that are there. At the start it takes the place of
    `init_process_group("flow")`. Later all ranks that live call it again, to go on without a rank that has ended, and with those that wait to
    join: see `newcomers`. A rank that is started again joins by its first call. Waits for all of them.

    The ranks keep their order; one that is started again has the place of the one before. What is pending in the old groups fails, and all of
    them are destroyed: sub-groups and modules are made and wrapped anew. After an error, when a rank does not come in time say, all may call it
    again.

    Raises RuntimeError outside flow-launch, and where init_process_group has made the default group.
    """
    if "FLOW_REPLACEMENT" not in os.environ:
        raise RuntimeError("flow: reconfigure() is for workers of flow-launch --elastic in-place: others call init_process_group")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise RuntimeError("flow: reconfigure() needs flow-launch's store: start the job without TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    if dist.is_initialized() and not _is_own_default():
        raise RuntimeError("flow: there is another default group: call flow_torch.reconfigure() in place of init_process_group")
    extension.load()
    store = _store()
    if dist.is_initialized() and not _last:
        _last.append(dist.group.WORLD)
    end = time.monotonic() + timeout.total_seconds()
    while True:
        _last[:] = [bindings.reconfigure(_last[0] if _last else None, timeout)]
        if dist.is_initialized():
            dist.destroy_process_group()
        try:
            _make_default(_last[0], store, timeout)
            meshes.ranks_have_changed()
            break
        except dist.DistError:  # a rank is lost since
            if time.monotonic() > end:
                raise
    _last.clear()


def _make_default(group, store, timeout):
    # What others have left in the store under the names of their groups is not for this one.
    name = torch.tensor([int.from_bytes(secrets.token_bytes(7), "little")])
    options = dist.BroadcastOptions()
    options.rootRank, options.asyncOp = 0, False
    group.broadcast([name], options).wait()
    store = dist.PrefixStore(f"flow/elastic/{name.item()}", store)
    if _hook and sys.excepthook.__module__ == dist.distributed_c10d.__name__:
        sys.excepthook = _hook[0]
    _hook[:] = [sys.excepthook]
    _made.append(group)
    try:
        dist.init_process_group("flow", store=store, rank=group.rank(), world_size=group.size(), timeout=timeout)
    finally:
        _made.clear()
        if dist.is_initialized():
            _default[:] = [weakref.ref(dist.group.WORLD)]


def _is_own_default():
    return bool(_default) and _default[0]() is dist.group.WORLD


def newcomers():
    """How many ranks wait for `reconfigure` to take them in. Ranks may see different numbers at a time."""
    if not dist.is_initialized() or not _is_own_default():
        raise RuntimeError("flow: newcomers() is for the group that flow_torch.reconfigure() has made: call that first")
    return bindings.find_backend(dist.group.WORLD).newcomers()


def made():
    """The group that `reconfigure` has made, for the backend that is being made; or None."""
    return _made[0] if _made else None


@functools.cache
def _store():
    """flow-launch's, which survives the ranks."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
