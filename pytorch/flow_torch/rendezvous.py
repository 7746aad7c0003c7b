"""The ranks of a group find each other, by the store that PyTorch has for it."""

import contextlib
import functools
import hashlib
import json
import os
import secrets
import socket
import sys
import time

import torch.distributed as dist

from . import bindings, extension, library

# Seconds between two looks into the store, of which each is twice as long as the one before. A wait of TCPStore's own would be deaf to
# signals, and warns when it is over.
PAUSES = 0.0005, 0.1
# Under this key rank 0 says that it is there.
HOST = "flow/host"


def join(options, join_in_python):
    """A group for the backend that is being made."""
    launcher = launcher_store(options.group_rank, options.group_size)
    return meet(
        options.store, options.group_rank, options.group_size, options.timeout, "init_process_group", join_in_python, launcher
    )


def meet(store, rank, size, timeout, call, join_in_python=None, launcher=None, members=""):
    """A group, on all its ranks: the C++ part's, or, if some rank does not have that, the one that `join_in_python` makes.
    None: it must be the C++ part's. `call`: the function of PyTorch's that asks for it, for errors. `launcher`: the address of flow-launch's
    store, if that has started this rank. `members`: what all must give alike.

    Rank 0 says that it is there, under a name that it has for this attempt only. The others answer to that name, with names of their own, by
    which it invites them when it has seen all. So what earlier attempts have left in the store, on any rank and however many, is nobody's
    answer and nobody's invitation: neither of ranks that have given up nor of those that were killed.
    """
    attempt = secrets.token_hex(8)
    own = {
        "attempt": attempt,
        "library": reason(library.load),
        "extension": reason(extension.load),
        "machine": machine(),
        "launcher": launcher,
        "members": hashlib.sha256(members.encode()).hexdigest(),
    }
    meeting = Meeting(store, rank, size, timeout, call)
    try:
        invited = invite(meeting, own) if rank == 0 else answer(meeting, own)
        group = accept(invited, store, rank, timeout, join_in_python)
    except BaseException:
        # Nothing more can be said where the store is gone with its process.
        with contextlib.suppress(RuntimeError):
            meeting.give_up()
        raise
    meeting.end()
    # Nobody ends, and the store with it, before all is deleted.
    group.barrier().wait()
    return group


def invite(meeting, own):
    """Rank 0's part: the invitation, when all others have answered."""
    meeting.say(HOST, own)
    others = range(1, meeting.size)
    answers = [answer_to(own["attempt"], rank) for rank in others]

    def missing():
        return [rank for rank, about in zip(others, map(meeting.read, answers)) if not about]

    while (found := meeting.read_all(answers)) is None:
        meeting.pause(missing)
    token = secrets.token_hex(16)
    invited = {"ranks": [own, *found], "token": token, "address": address([about["machine"] for about in [own, *found]], token)}
    for about in found:
        meeting.store.set(invitation_of(about["attempt"]), json.dumps(invited))
    return invited


def answer(meeting, own):
    """Another rank's part: the invitation. Rank 0 may give up meanwhile, or be killed, and come again."""
    invitation, host = invitation_of(own["attempt"]), None

    def missing():
        return [rank for rank in range(1, meeting.size) if host and not meeting.read(answer_to(host["attempt"], rank))]

    while not (invited := meeting.read(invitation)):
        answered, host = host, meeting.read(HOST)
        if host and host != answered:
            meeting.say(answer_to(host["attempt"], meeting.rank), own)
        meeting.pause(missing)
    meeting.store.delete_key(invitation)
    return invited


def answer_to(attempt, rank):
    return f"flow/answer/{attempt}/{rank}"


def invitation_of(attempt):
    return f"flow/invitation/{attempt}"


class Meeting:
    """One rank's place in the store where the ranks meet, until the timeout."""

    def __init__(self, store, rank, size, timeout, call):
        self.store, self.rank, self.size, self._call = store, rank, size, call
        self._seconds = timeout.total_seconds()
        self._end = time.monotonic() + self._seconds
        self._pause = PAUSES[0]
        self._said = {}

    def say(self, key, about):
        self._said[key] = json.dumps(about)
        self.store.set(key, self._said[key])

    def end(self):
        """All have met."""
        for key in self._said:
            self.store.delete_key(key)

    def give_up(self):
        """Takes back what this rank has said, unless another process has said something in its place by now."""
        for key, said in self._said.items():
            self.store.compare_set(key, said, "")

    def read(self, key):
        """What a rank has said, unless it has taken that back."""
        said = self.store.get(key) if self.store.check([key]) else None
        return json.loads(said) if said else None

    def read_all(self, keys):
        """What ranks have said, when all have said something."""
        if keys and not self.store.check(keys):
            return None
        said = [self.read(key) for key in keys]
        return said if all(said) else None

    def pause(self, missing):
        """`missing` finds the ranks that have not come, for the error when the time is over."""
        if time.monotonic() >= self._end:
            absent = missing() or [0]
            ranks = ("ranks " if len(absent) > 1 else "rank ") + ", ".join(map(str, absent))
            raise dist.DistStoreError(f"flow: {ranks} of {self.size} did not join within {self._seconds:g} s, the timeout of {self._call}")
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, PAUSES[1])


def accept(invited, store, rank, timeout, join_in_python):
    """Joins, with the ranks that are invited. Groups that follow from the group meet in the same store."""
    ranks, token = invited["ranks"], invited["token"]
    unlike = [other for other, found in enumerate(ranks) if found["members"] != ranks[0]["members"]]
    if unlike:
        raise ValueError(f"flow: rank {unlike[0]} gives other members than rank 0: all are to give the same ones, in the same order")
    for other, found in enumerate(ranks):
        missing = found["library"] or join_in_python is None and found["extension"]
        if missing:
            raise ImportError(f"flow_torch: rank {other} cannot join: {missing}")
    reasons = [f"rank {other}: {found['extension']}" for other, found in enumerate(ranks) if found["extension"]]
    if rank == 0 and reasons:
        say_once(f"flow_torch: all ranks use the slower part in Python: {reasons[0]}")

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
    if reasons:
        return join_in_python(place, token, timeout)
    return bindings.keep_store(bindings.join(place, token, timeout), store)


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
