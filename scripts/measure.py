"""What `scripts/bench` measures with: commands that are run, their figures, and the table's lines."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent
RELEASE = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release"
PEERS = ROOT / "scripts" / "peers"
KIB, MIB = 1 << 10, 1 << 20
LIMIT_S = 900  # for one command
BUSY_LOOPS = 1, 2


def fail(message):
    sys.exit(f"bench: error: {message}")


def run(*command):
    """Runs a command; returns what it printed and how long it took, in us."""
    command = [str(part) for part in command]
    start = perf_counter()
    try:
        child = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        fail(f"{' '.join(command)} took more than {LIMIT_S} s")
    elapsed = (perf_counter() - start) * 1e6
    if child.returncode != 0:
        sys.stderr.write(child.stderr[-4000:])
        fail(f"{' '.join(command)} ended with exit code {child.returncode}")
    return child.stdout, elapsed


@contextlib.contextmanager
def busy_loops(count):
    """So many processes that only compute, beside what is measured."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class Figures(dict):
    """All values seen of each figure: (who, bench, detail...) -> list. Times are in us, if their names do not say ms."""

    def add(self, key, value):
        self.setdefault(key, []).append(value)

    def median(self, *key):
        """None for a peer that was not measured."""
        if key in self:
            return statistics.median(self[key])
        if key[0].startswith("flow"):
            fail(f"no figure was printed for {' '.join(map(str, key[1:]))}")
        return None

    def add_lines(self, who, output):
        """Adds the JSON lines that a bench printed."""
        for line in map(json.loads, filter(lambda line: line.startswith("{"), output.splitlines())):
            if line["bench"] == "allreduce":
                key = who, "allreduce", line["memory"], line["ranks"], line["bytes"]
                self.add(key, line["median_us"])
                self.add((*key, "mean"), line["mean_us"])
            elif line["bench"] == "overhead":
                key = who, "overhead", line["name"], line["ranks"]
                self.add(key, line["global_us"] - line["plain_us"])
                self.add((*key, "ratio"), line["global_us"] / line["plain_us"])
            elif line["bench"] == "boxing":
                key = who, "boxing", line["pair"], line["bytes"]
                self.add(key, line["median_us"])
                if "limit_us" in line:
                    self.add((*key, "limit"), line["limit_us"])
                    self.add((*key, "ratio"), line["limit_us"] / line["median_us"])
            elif line["bench"] == "gpt":
                key = who, "gpt", line["width"], line["tokens"]
                self.add((*key, "parallel"), line["parallel_ms"] * 1e3)
                if "alone_ms" in line:
                    self.add((*key, "alone"), line["alone_ms"] * 1e3)
                    self.add((*key, "ratio"), line["alone_ms"] / line["parallel_ms"])
            elif line["bench"] == "pipeline":
                key = who, "pipeline", line["schedule"], line["ranks"]
                self.add((*key, "step"), line["step_ms"] * 1e3)
                for name in filter(line.__contains__, ("efficiency", "limit")):
                    self.add((*key, name), line[name])
            elif line["bench"] == "sbp":
                for name in ("sbp", "ddp"):
                    self.add((who, name, line["model"]), line[f"{name}_ms"] * 1e3)
                self.add((who, "sbp", line["model"], "ratio"), line["ddp_ms"] / line["sbp_ms"])
            elif line["bench"] == "sharded":
                key = who, "sharded", line["model"], line["optimizer"], line["ranks"]
                self.add((*key, "ddp"), line["ddp_ms"] * 1e3)
                self.add((*key, "fsdp"), line["fsdp_ms"] * 1e3)
                self.add((*key, "speedup"), line["speedup"])
            elif line["bench"] == "sharded_memory":
                self.add((who, "memory", line["optimizer"], line["ranks"]), line["mib"])
            elif line["bench"] == "global-checkpoints":
                for name in "async_save", "in_memory", "copy":
                    self.add((who, "global-checkpoints", name), line[f"{name}_ms"] * 1e3)
            elif line["bench"] == "in-memory-checkpoints":
                for name in "stall", "copy":
                    self.add((who, "in-memory-checkpoints", name), line[f"{name}_ms"] * 1e3)
            elif line["bench"] == "checkpoints":
                for name in "dd_write", "save", "dd_read", "load", "copy", "async_save", "resume":
                    self.add((who, "checkpoints", name), line[f"{name}_ms"] * 1e3)
            elif line["bench"] == "fsdp2":
                self.add((who, "fsdp2", line["model"], line["optimizer"], line["backend"]), line["step_ms"] * 1e3)
            elif line["bench"] == "sync_batchnorm":
                for name in ("with", "without"):
                    self.add((who, f"{name} SyncBatchNorm", line["model"]), line[f"{name}_ms"] * 1e3)
            elif line["bench"] == "limit":
                self.add((who, "limit", line["bytes"]), line["median_us"])
            elif line["bench"] == "step" and line.get("ranks") == 1:
                self.add((who, "alone", line["model"]), line["efficiency"])
            elif line["bench"] == "step":
                self.add((who, "step", line["model"]), line["efficiency"])
                for name in filter(line.__contains__, ("barrier_ms", "ddp_ms", "ddp_mean_ms")):
                    self.add((who, name, line["model"]), line[name])


def flow_launch(ranks, *program):
    return run(RELEASE / "flow-launch", "--nproc_per_node", ranks, *program)


def torchrun_command(python, ranks, *program):
    return [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks, *program]


def torchrun(python, ranks, *program):
    return run(*torchrun_command(python, ranks, *program))


def spread(seconds):
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def size_name(size):
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def time_name(us):
    value, unit = (us, "us") if us < 999.5 else (us / 1e3, "ms") if us < 999.5e3 else (us / 1e6, "s")
    return f"{value:.3g} {unit}"


def row(name, flow, peer, at_least=None, at_most=None, ratio=None):
    """One line of the table, of times in us. `at_least` bounds the ratio peer / flow, `at_most` Flow's own time.

    `ratio` is given where it is better known: as the median of runs that measured both.
    """
    if ratio is None and peer is not None:
        ratio = peer / flow
    target = reached = ""
    if at_least is not None:
        target = f"ratio >= {at_least:g}"
        reached = "not measured" if ratio is None else "yes" if ratio >= at_least else "NO"
    elif at_most is not None:
        target = f"<= {time_name(at_most)}"
        reached = "yes" if flow <= at_most else "NO"
    shown_ratio = "" if ratio is None else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
    return [name, time_name(flow), "" if peer is None else time_name(peer), shown_ratio, target, reached]
