"""How the ranks of a group find each other, by the store that PyTorch has for it."""

import os
import secrets
import socket

from . import extension

FAILED = "failed: "


def join(options):
    """The backend of a group, on all its ranks. What they leave in the store is deleted again: the store may serve another group of
    the same name."""
    store, rank, size = options.store, options.group_rank, options.group_size
    own = f"flow/machine/{rank}"
    try:
        flow = extension.load()
        store.set(own, machine())
    except (ImportError, OSError) as error:
        # The others need not wait for this rank.
        store.set(own, FAILED + str(error))
        raise
    machines = [store.get(f"flow/machine/{other}").decode() for other in range(size)]
    for other, found in enumerate(machines):
        if found.startswith(FAILED):
            raise ImportError(f"flow_torch: rank {other} cannot join: {found[len(FAILED):]}")
    if rank == 0:
        token = secrets.token_hex(16)
        store.set("flow/job", f"{token} {address(machines, token)}")
    token, at = store.get("flow/job").decode().split()

    if is_launched(rank, size):
        place = None  # flow-launch's store, in which it says how ranks end
    else:
        local = [other for other in range(size) if machines[other] == machines[rank]]
        place = flow.Place(
            rank=rank,
            world_size=size,
            local_rank=local.index(rank),
            local_world_size=len(local),
            node=list(dict.fromkeys(machines)).index(machines[rank]),
            address=at,
            token=token,
        )
    backend = flow.join(place=place, name=token, timeout=options.timeout)
    store.delete_key(own)
    if rank == 0:
        store.delete_key("flow/job")
    # Nobody goes on before all is deleted.
    backend.barrier().wait()
    return backend


def is_launched(rank, size):
    """Whether flow-launch has started the ranks, and these are the group's."""
    place = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    return bool(os.environ.get("FLOW_STORE")) and place == (str(rank), str(size))


def machine():
    """The same for processes that can share memory, and for no others."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "user")]
    return " ".join([boot, *spaces])


def address(machines, token):
    """Where rank 0 serves Flow's own store."""
    if len(set(machines)) == 1:
        return f"unix://flow-torch-{token}"
    host = os.environ.get("FLOW_LOCAL_ADDR") or os.environ.get("MASTER_ADDR") or socket.gethostname()
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
