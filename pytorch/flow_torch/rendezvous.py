"""The ranks of a group find each other, by the store that PyTorch has for it."""

import contextlib
import datetime
import functools
import json
import os
import secrets
import socket
import sys
import time

import torch.distributed as dist

from . import extension, library

# How long one wait for the store is: in between Python looks at signals.
SLICE = datetime.timedelta(milliseconds=500)


def join(options, join_in_python):
    """The backend of a group."""
    launcher = launcher_store(options.group_rank, options.group_size)
    return meet(options.store, options.group_rank, options.group_size, options.timeout, join_in_python, launcher)


def merge(store, rank, size, timeout, join_in_python=None):
    """The backend of a group that processes of other groups make by a store of their own: ProcessGroup.merge_remote_group."""
    return meet(store, rank, size, timeout, join_in_python)


def meet(store, rank, size, timeout, join_in_python, launcher=None):
    """The backend of a group, on all its ranks: the C++ part's, or, if some rank does not have that, the one that `join_in_python` makes.
    None: it must be the C++ part's. `launcher`: the address of flow-launch's store, if that has started this rank.

    Each rank says that it is there, under a name that it has for this attempt only. When rank 0 has seen all, it invites each by that
    name. What earlier attempts have left in the store, on any rank and however many, is nobody's invitation.
    """
    attempt = secrets.token_hex(8)
    about = {
        "attempt": attempt,
        "library": reason(library.load),
        "extension": reason(extension.load),
        "machine": machine(),
        "launcher": launcher,
    }
    said = json.dumps(about)
    here = [f"flow/rank/{other}" for other in range(size)]
    invitation = f"flow/invitation/{attempt}"
    end = time.monotonic() + timeout.total_seconds()
    store.set(here[rank], said)
    try:
        if rank == 0:
            ranks = [json.loads(found) for found in wait(store, here, here, end, timeout)]
            token = secrets.token_hex(16)
            invited = json.dumps({"ranks": ranks, "token": token, "address": address([found["machine"] for found in ranks], token)})
            for found in ranks[1:]:
                store.set(f"flow/invitation/{found['attempt']}", invited)
        else:
            [invited] = wait(store, [invitation], here, end, timeout)
        backend = accept(json.loads(invited), rank, timeout, join_in_python)
    except BaseException:
        # Nothing more can be said where the store is gone with its process.
        with contextlib.suppress(RuntimeError):
            store.compare_set(here[rank], said, "")
            store.delete_key(invitation)
        raise
    store.delete_key(here[rank])
    store.delete_key(invitation)
    # Nobody ends, and the store with it, before all is deleted.
    backend.barrier().wait()
    return backend


def wait(store, keys, here, end, timeout):
    """The values of keys, when there are all. `here`: the ranks', by which those that are missing are known."""
    while not all(values := read(store, keys)):
        left = datetime.timedelta(seconds=end - time.monotonic())
        if left <= datetime.timedelta(0):
            missing = [rank for rank, value in enumerate(read(store, here)) if not value] or [0]
            ranks = ("ranks " if len(missing) > 1 else "rank ") + ", ".join(map(str, missing))
            raise dist.DistStoreError(
                f"flow: {ranks} of {len(here)} did not join within {timeout.total_seconds():g} s, the timeout of init_process_group"
            )
        absent = [key for key, value in zip(keys, values) if value is None]
        if not absent:  # a rank has given up, and may try again
            time.sleep(0.01)
            continue
        with contextlib.suppress(RuntimeError):  # the time is over
            store.wait(absent, min(left, SLICE))
    return values


def read(store, keys):
    """Their values: None of those that are not there; empty if the rank has given up."""
    return [store.get(key) if store.check([key]) else None for key in keys]


def accept(invited, rank, timeout, join_in_python):
    """Joins, with the ranks that are invited."""
    ranks, token = invited["ranks"], invited["token"]
    for other, found in enumerate(ranks):
        missing = found["library"] or join_in_python is None and found["extension"]
        if missing:
            raise ImportError(f"flow_torch: rank {other} cannot join: {missing}")
    reasons = [f"rank {other}: {found['extension']}" for other, found in enumerate(ranks) if found["extension"]]
    if rank == 0 and reasons:
        say_once(f"flow_torch: all ranks use the slower part in Python: {reasons[0]}")
    join_part = join_in_python if reasons else extension.join

    if ranks[0]["launcher"] and len({found["launcher"] for found in ranks}) == 1:
        place = None  # flow-launch's store, in which it says how ranks end
    else:
        machines = [found["machine"] for found in ranks]
        local = [other for other, its in enumerate(machines) if its == machines[rank]]
        place = {
            "rank": rank,
            "world_size": len(ranks),
            "local_rank": local.index(rank),
            "local_world_size": len(local),
            "node": list(dict.fromkeys(machines)).index(machines[rank]),
            "address": invited["address"],
            "token": token,
        }
    return join_part(place, token, timeout)


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
    """Returns where rank 0 serves Flow's own store."""
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
