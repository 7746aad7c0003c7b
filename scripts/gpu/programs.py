"""Starts the bundle's programs and PyTorch's peers, and keeps what they print."""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from time import monotonic

BUNDLE = Path(__file__).resolve().parent
TORCH_VERSION = "2.11."
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "SLURM_", "TORCHELASTIC_", "FLOW_", "NCCL_HOSTID")
# Ranks that share a GPU look like hosts of their own; whatever network there is, both sides take the same.
SHARED = {"NCCL_NET": "Socket"}
AS_HOST = ["sh", "-c", 'NCCL_HOSTID=rank-$RANK exec "$0" "$@"']

PROBE = """
import glob, json, os, platform, torch
folder = os.path.dirname(torch.__file__)
with_cuda = torch.version.cuda is not None
count = torch.cuda.device_count() if with_cuda else 0
print(json.dumps({
    "python": platform.python_version(),
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if with_cuda else None,
    "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
    "folders": [folder + "/lib", *sorted(glob.glob(os.path.dirname(folder) + "/nvidia/*/lib"))],
}))
"""


class CannotRun(Exception):
    """Something that the machine or the bundle lacks."""


class Failed(Exception):
    """A program that failed, or a result that is wrong."""


def probe(python):
    """What is to be known of this interpreter's torch."""
    child = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise CannotRun(f"{python} has no usable torch ({last}): name one that has, with --python")
    found = json.loads(child.stdout.splitlines()[-1])
    if not found["torch"].startswith(TORCH_VERSION):
        raise CannotRun(f"{python} has torch {found['torch']}, the bundle is built for {TORCH_VERSION}x: name another")
    if found["cuda"] is None:
        raise CannotRun(f"{python} has torch {found['torch']} without CUDA: name another with --python")
    return found


def driver():
    """The driver's version, from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


class Programs:
    def __init__(self, python, torch, fakes, out, limit):
        self.python = python
        self.gpus = 1 if fakes else len(torch["gpus"])
        self.rehearsal = fakes is not None
        self.out = out
        self.limit = limit  # in seconds, for one program
        self.log = open(out / "log.txt", "a", encoding="utf-8")
        self.lock = threading.Lock()
        self.running = set()

        self.peer_environment = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
        # Programs that were built here find the libtorch of their build, beside which there is no NCCL but the fake.
        folders = [fakes] if fakes else torch["folders"]
        variables = {"FLOW_CACHE": out / "cache", "RUST_BACKTRACE": 0}
        if fakes:
            variables["FLOW_NCCL_PATH"] = fakes / "libnccl_fake.so"
            variables["FLOW_FAKE_GPUS"] = self.gpus
        folders = [*map(str, folders), os.environ.get("LD_LIBRARY_PATH", "")]
        variables["LD_LIBRARY_PATH"] = ":".join(filter(None, folders))
        self.environment = {**self.peer_environment, **{k: str(v) for k, v in variables.items()}}

    def compare_exactly(self, exactly):
        """Whether products are in f32, also where they may be in TF32: batches of other sizes then compare better. Several checks run at
        once, so that a program on the CPU cannot have all cores."""
        for environment in (self.environment, self.peer_environment):
            environment.pop("NVIDIA_TF32_OVERRIDE", None)
            environment["OMP_NUM_THREADS"] = "1"
            if exactly:
                environment["NVIDIA_TF32_OVERRIDE"] = "0"
                environment["OMP_NUM_THREADS"] = "4"

    def flow(self, ranks, program, *arguments, **variables):
        """What a program of the bundle prints, as that many ranks; 0: without flow-launch."""
        command = [BUNDLE / "bin" / program, *arguments]
        if isinstance(ranks, int) and ranks > self.gpus:
            command = [*AS_HOST, *command]
            variables = {"FLOW_TEST_SHARE_GPUS": "1", **SHARED, **variables}
        if ranks:
            command = [BUNDLE / "bin" / "flow-launch", "--nproc_per_node", ranks, *command]
        if self.rehearsal and program not in ("cuda_check", "worker"):
            variables["FLOW_TEST_HOST_AS_GPU"] = "1"  # tensors stay on the CPU
        return self.run(command, {**self.environment, **variables})

    def pair(self, job, program, *arguments):
        """What rank 0 prints of two that nobody launches, so that nobody stops one when the other fails."""
        command = [BUNDLE / "bin" / program, *arguments]
        variables = {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": job}
        if self.gpus < 2:
            command = [*AS_HOST, *command]
            variables |= {"FLOW_TEST_SHARE_GPUS": "1", **SHARED}
        environments = [{**self.environment, **variables, "RANK": str(rank)} for rank in range(2)]
        quiet = {name: subprocess.DEVNULL for name in ("stdin", "stdout", "stderr")}
        other = subprocess.Popen(command, env=environments[1], start_new_session=True, **quiet)
        with self.lock:
            self.running.add(other)
        try:
            return self.run(command, environments[0])
        finally:
            stop(other)
            with self.lock:
                self.running.discard(other)

    def pytorch(self, ranks, script, *arguments):
        """What a peer prints; in a rehearsal it works on the CPU."""
        command = [self.python, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc_per_node", ranks]
        command += [BUNDLE / "peers" / script, "--device", "cpu" if self.rehearsal else "cuda"]
        command += ["--share-gpus"] if ranks > self.gpus else []
        variables = SHARED if ranks > self.gpus else {}
        try:
            return self.run([*command, *arguments], {**self.peer_environment, **variables})
        except Failed as error:
            raise Failed(f"PyTorch: {error}") from error

    def run(self, command, environment):
        command = [str(part) for part in command]
        start = monotonic()
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        with self.lock:
            self.running.add(child)
        try:
            output, errors = child.communicate(timeout=self.limit)
            ended = f"exit code {child.returncode}" if child.returncode else None
        except subprocess.TimeoutExpired:
            stop(child)
            output, errors = child.communicate()
            ended = f"not done after {self.limit} s"
        with self.lock:
            self.running.discard(child)
            last = f"[{ended or 'ok'}, {monotonic() - start:.1f} s]\n"
            print(f"$ {' '.join(command)}\n{output}{errors}{last}", file=self.log)
            self.log.flush()
        if ended:
            raise Failed(f"{ended}: {reason(errors)}")
        return output

    def stop_all(self):
        with self.lock:
            for child in self.running:
                stop(child)


def stop(child):
    """Ends a program and what it has started: launchers end their workers on SIGTERM."""
    for number, timeout in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
        try:
            os.killpg(child.pid, number)
            child.wait(timeout)
            return
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def reason(errors):
    """The most useful line, with its cause: the first that names an error, else the last."""
    lines = [line.removeprefix("flow-launch:   |").strip() for line in errors.splitlines()]
    lines = [line for line in lines if line] or ["it printed no reason"]
    first = next((line for line in lines if "rror" in line), lines[-1])
    # Ranks write at the same time.
    after = (line for before, line in zip(lines, lines[1:]) if before == "Caused by:")
    causes = [line for line in after if not line.startswith(("Error:", "Caused by:"))]
    return ": ".join([first, *causes[:1]])[:400]


def json_line(output):
    """The one JSON line among what a bench printed."""
    for line in output.splitlines():
        if line.startswith("{"):
            return json.loads(line)
    raise Failed("it printed no JSON line")
