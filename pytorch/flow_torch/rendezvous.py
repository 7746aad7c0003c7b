"""How the ranks of a group find each other, by the store that PyTorch has for it."""

import collections
import contextlib
import functools
import json
import os
import secrets
import socket
import sys

from . import extension, library

# How often this process has joined groups of these names: their ranks do so equally often.
_joined = collections.Counter()


def join(options, is_mixed):
    """The backend of a group. `is_mixed`: the group has other backends as well, for other devices."""
    rank, size = options.group_rank, options.group_size
    prefix = f"flow/{_joined[options.group_id]}"
    _joined[options.group_id] += 1
    return meet(options.store, prefix, rank, size, options.timeout, is_mixed, launcher_store(rank, size))


def merge(store, rank, size, timeout):
    """The backend of a group that processes of other groups make by a store of their own: ProcessGroup.merge_remote_group."""
    return meet(store, "flow", rank, size, timeout, False, None)


def meet(store, prefix, rank, size, timeout, is_mixed, launcher):
    """The backend of a group, on all its ranks: the C++ part's, or, if some rank does not have that, the one in Python, which a mixed group
    cannot have. `launcher`: the address of flow-launch's store, if that has started this rank."""
    own = f"{prefix}/rank/{rank}"
    about = {
        "library": reason(library.load),
        "extension": reason(extension.load),
        "machine": machine(),
        "launcher": launcher,
    }
    store.set(own, json.dumps(about))
    ranks = [json.loads(store.get(f"{prefix}/rank/{other}")) for other in range(size)]
    for other, found in enumerate(ranks):
        missing = found["library"] or is_mixed and found["extension"]
        if missing:
            raise ImportError(f"flow_torch: rank {other} cannot join: {missing}")
    reasons = [f"rank {other}: {found['extension']}" for other, found in enumerate(ranks) if found["extension"]]
    if rank == 0 and reasons:
        say_once(f"flow_torch: all ranks use the slower part in Python: {reasons[0]}")
    if reasons:
        from . import fallback as part
    else:
        part = extension.load()

    machines = [found["machine"] for found in ranks]
    if rank == 0:
        token = secrets.token_hex(16)
        store.set(f"{prefix}/job", f"{token} {address(machines, token)}")
    token, at = store.get(f"{prefix}/job").decode().split()
    if ranks[0]["launcher"] and len({found["launcher"] for found in ranks}) == 1:
        place = None  # flow-launch's store, in which it says how ranks end
    else:
        local = [other for other in range(size) if machines[other] == machines[rank]]
        place = part.Place(
            rank=rank,
            world_size=size,
            local_rank=local.index(rank),
            local_world_size=len(local),
            node=list(dict.fromkeys(machines)).index(machines[rank]),
            address=at,
            token=token,
        )
    backend = part.join(place=place, name=token, timeout=timeout)
    store.delete_key(own)
    if rank == 0:
        store.delete_key(f"{prefix}/job")
    # Nobody ends, and the store with it, before all is deleted.
    backend.barrier().wait()
    return backend


@functools.cache
def say_once(message):
    print(message, file=sys.stderr, flush=True)


def reason(load):
    """Why this cannot be loaded, or None."""
    try:
        load()
    except ImportError as error:
        return str(error).removeprefix("flow_torch: ")


def launcher_store(rank, size):
    """The address of flow-launch's store, if that has started the ranks, and these are the group's."""
    place = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    return os.environ.get("FLOW_STORE") if place == (str(rank), str(size)) else None


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
    host = os.environ.get("FLOW_LOCAL_ADDR") or own_host(os.environ.get("MASTER_ADDR"))
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def own_host(master):
    """`master`, if that is this machine, else this machine's address on the way there."""
    try:
        hosts = [(family, place[0]) for family, *_, place in socket.getaddrinfo(master, 0, type=socket.SOCK_DGRAM)] if master else []
    except OSError:
        hosts = []
    for family, host in hosts:
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.bind((host, 0))
            return master
    for family, host in hosts:
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((host, 9))  # sends nothing
            return probe.getsockname()[0]
    return socket.gethostname()
