"""The job of which `scripts/elastic` kills parts: its flow-launch processes, and the machines that they run on."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from measure import RELEASE

PORT = 29400
BACK_S = 0.5, 2  # after which a killed agent is started again
WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"]


def fail(message):
    sys.exit(f"elastic: error: {message}")


class Machines:
    """So many network namespaces that reach each other, or none. They go with this process."""

    def __init__(self, count):
        self.holders = []
        if count == 0:
            return
        switch = self.hold()
        self.ip(switch, "link add bridge type bridge")
        self.ip(switch, "link set bridge up")
        for number in range(count):
            holder = self.hold()
            self.holders.append(holder)
            self.ip(switch, f"link add port{number} type veth peer name eth0 netns {holder}")
            self.ip(switch, f"link set port{number} master bridge up")
            self.ip(holder, f"addr add {self.address(number)}/24 dev eth0")
            self.ip(holder, "link set lo up")
            self.ip(holder, "link set eth0 up")

    def hold(self):
        """Returns a process that has a network namespace of its own."""
        command = [*WITH_PARENT, "unshare", "--net", "sh", "-c", "echo ready; exec sleep infinity"]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE)
        holder.stdout.readline()
        return holder.pid

    def ip(self, holder, arguments):
        subprocess.run([*self.inside(holder), "ip", *arguments.split()], check=True)

    def inside(self, holder):
        return ["nsenter", f"--net=/proc/{holder}/ns/net"]

    def address(self, number):
        return f"10.0.0.{number + 1}" if self.holders else "127.0.0.1"

    def enter(self, number):
        return self.inside(self.holders[number]) if self.holders else []


class Agent:
    """A flow-launch process."""

    def __init__(self, command, environment, stderr):
        self.stderr = stderr
        with open(stderr, "w") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=file)
        self.back_at = None
        self.read = 0

    def electing(self):
        """How many nodes elect the next leader, if one of them has a copy of the store: as the present one has told it."""
        pattern = r"(\d+) nodes elect the next leader(, and one has a copy)?"
        told = re.findall(pattern, self.stderr.read_text()[self.read :])
        return int(told[-1][0]) if told and told[-1][1] else 0


class Job:
    """A job of one agent with all ranks, or of an agent for each rank, and a spare one."""

    def __init__(self, options, folder, program, machines):
        self.folder, self.program, self.machines = folder, program, machines
        self.is_cluster = options.is_cluster
        (folder / "tmp").mkdir()
        self.environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "FLOW_LOG": "warn,flow_launch::control=info"}
        self.flags = ["--elastic", "in-place", "--max-restarts", options.ranks * options.kills + 9]
        if options.is_cluster:
            meeting = f"{machines.address(0)}:{PORT}"
            self.flags += ["--nnodes", options.ranks, "--nproc_per_node", 1, "--rdzv-id", "elastic", "--rdzv-endpoint", meeting]
            self.flags += ["--rdzv-conf", "last_call_timeout=5,join_timeout=60"]
        else:
            self.flags += ["--nproc_per_node", options.ranks]
        self.started = 0
        self.elections = 0
        self.agents = []
        for number in range(options.ranks + 1 if options.is_cluster else 1):
            self.agents.append(self.start(number))

    def start(self, number):
        self.started += 1
        command = [*self.machines.enter(number), *WITH_PARENT, RELEASE / "flow-launch", *self.flags, *self.program]
        return Agent(list(map(str, command)), self.environment, self.folder / f"stderr-{self.started}")

    def check(self):
        """Starts killed agents again whose time has come. Ends the script if another one has ended."""
        for number, agent in enumerate(self.agents):
            if agent.back_at is None:
                if agent.process.poll() is not None:
                    self.fail(f"agent {number} has ended with exit code {agent.process.returncode}")
            elif time.time() > agent.back_at:
                self.agents[number] = self.start(number)

    def leader(self):
        """The agent that leads: the last that was elected, or at first the one that is told of no election."""
        alive = [agent for agent in self.agents if agent.back_at is None]
        leading = [agent for agent in alive if "this one leads the job from now on" in agent.stderr.read_text()]
        if not leading and not self.elections:
            leading = [agent for agent in alive if "elect the next leader" not in agent.stderr.read_text()]
        return leading[0] if len(leading) == 1 else None

    def until_settled(self, limit):
        """Waits until each agent would know how to elect another leader."""
        deadline = time.time() + limit
        while self.is_cluster:
            self.check()
            leader = self.leader()
            others = [agent for agent in self.agents if agent is not leader]
            electing = (len(self.agents) - 1) // 2 * 2 + 1  # an odd number
            if leader and all(agent.back_at is None and agent.electing() == electing for agent in others):
                return
            if time.time() > deadline:
                self.fail(f"the agents are not back after {limit} s")
            time.sleep(0.05)

    def victims(self, kind, workers):
        """The processes to kill: one or more workers, though not all, or an agent that has a worker."""
        if kind == "worker":
            return random.sample(workers, random.randint(1, max(1, len(workers) - 1)))
        leader = self.leader()
        if leader is None:
            self.fail("no agent leads")
        if kind == "leader":
            return [leader.process.pid]
        return [random.choice(sorted({parent(pid) for pid in workers} - {leader.process.pid}))]

    def workers(self):
        """All that run, also those that have not joined yet."""
        agents = [agent.process.pid for agent in self.agents if agent.process.poll() is None]
        return [pid for agent in agents for pid in children(agent) if is_program(pid, self.program[0])]

    def workers_of(self, victims, workers):
        """Those of the workers that end with these processes."""
        return {pid for pid in workers if pid in victims or parent(pid) in victims}

    def kill(self, victims):
        leader = self.leader()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        if leader and leader.process.pid in victims:
            self.elections += 1
            for agent in self.agents:
                agent.read = len(agent.stderr.read_text())
        for agent in self.agents:
            if agent.process.pid in victims:
                agent.process.wait()
                agent.back_at = time.time() + random.uniform(*BACK_S)

    def until_ended(self, limit):
        deadline = time.time() + limit
        for number, agent in enumerate(self.agents):
            if agent.back_at is None and agent.process.wait(timeout=deadline - time.time()):
                self.fail(f"agent {number} has ended with exit code {agent.process.returncode}")

    def end(self):
        for agent in self.agents:
            agent.process.kill()
            agent.process.wait()

    def check_nothing_is_left(self):
        """Shared memory and sockets have no names: they go with the processes."""
        mark = f"TMPDIR={self.folder / 'tmp'}"
        left = [pid for pid in os.listdir("/proc") if pid.isdigit() and mark in environment(pid)]
        if left:
            fail(f"processes are left: {left}")
        files = [file for file in (self.folder / "tmp").rglob("*") if not file.is_dir()]
        files += [file for file in (self.folder / "checkpoints").glob(".*") if file.name != ".checkpoint.lock"]
        if files:
            fail(f"files are left: {files}")

    def fail(self, message):
        texts = [f"agent {number}: {agent.stderr.read_text()[-2000:]}" for number, agent in enumerate(self.agents)]
        fail("\n".join([message, *texts]))


def environment(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return []


def is_program(pid, path):
    try:
        return Path(f"/proc/{pid}/exe").readlink() == path.resolve()
    except OSError:
        return False


def is_alive(pid):
    """A zombie is not: who has lost its parent is one until the machine's first process has reaped it."""
    return stat(pid)[0] not in "ZX"


def parent(pid):
    return int(stat(pid)[1])


def stat(pid):
    """The state of a process, and its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return ["X", 0]


def children(pid):
    """The children of all threads of a process."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, file.read_text().split())
        except OSError:
            pass  # The thread has ended.
    return found
