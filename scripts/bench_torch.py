"""The benches of PyTorch over Flow, for `scripts/bench`."""

import json
import os
import pathlib
import statistics
import subprocess
import tempfile

from measure import BUSY_LOOPS, LIMIT_S, MIB, PEERS, RELEASE, ROOT, busy_loops, fail, row, run, size_name, torchrun_command

SIZES = [4, 1 << 10, 64 << 10, 256 << 10, MIB, 4 * MIB, 25 * MIB, 100 * MIB, 256 * MIB]
LARGE = [size for size in SIZES if size >= MIB]
STEP_TO_REACH = {"mlp": 2.9, "wide": 1.8, "lenet": 1.2, "mobilenet": 1, "wide + fp16 hook": 1.5, "wide + join": 1.5, "sparse": 1.5}
SHARDED = ["wide", "GPT block"]
BUSY_SIZES = [4, 64 << 10, MIB, 25 * MIB]
BUSY_MODELS = ["mlp", "wide"]
QUICK = ["--blocks", 3]
PARTS_MODELS = ["tiny", "mlp", "lenet", "wide", "mobilenet"]
PARTS_CLASSES = ["PyTorch's DDP", "flow_torch's DDP"]


def one_round(figures, python, is_quick):
    figures.add_lines("flow", run(RELEASE / "flow-bench", "limit", "--json", "--sizes", ",".join(map(str, LARGE)))[0])
    measure(figures, "flow, backend", python, is_quick, SIZES, STEP_TO_REACH, SHARDED)
    measure_parts(figures, python, blocks=3 if is_quick else 11)
    for loops in BUSY_LOOPS:
        with busy_loops(loops):
            measure(figures, f"flow, backend, {loops}", python, is_quick, BUSY_SIZES, BUSY_MODELS, ["-"])


def measure(figures, who, python, is_quick, *names):
    flags = [part for flag, of in zip(("--sizes", "--models", "--sharded"), names) for part in (flag, ",".join(map(str, of)))]
    program = PEERS / "backends.py", *flags, *(QUICK if is_quick else [])
    for line in run("env", f"PYTHONPATH={ROOT / 'pytorch'}", *torchrun_command(python, 2, *program))[0].splitlines():
        line = json.loads(line)
        key = who, line["way"], line["name"]
        figures.add(key, line["median_us"])
        figures.add((*key, "ratio"), line["ratio"])


def measure_parts(figures, python, blocks):
    """Both parts, in two jobs that take turns; without a compiler it is the part in Python."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        (path / "0").touch()
        parts = {"flow, C++ part": {}, "flow, part in Python": {"CXX": "/nonexistent/c++", "FLOW_CACHE": folder}}
        jobs = {}
        for number, (who, variables) in enumerate(parts.items()):
            command = torchrun_command(python, 2, PEERS / "parts.py", folder, number, ",".join(PARTS_MODELS), blocks)
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "pytorch"), **variables}
            jobs[who] = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            printed = {who: job.communicate(timeout=LIMIT_S)[0] for who, job in jobs.items()}
        finally:
            for job in jobs.values():
                job.kill()
        if any(job.returncode for job in jobs.values()):
            fail("steps over one of flow_torch's parts failed")
    for line, other in zip(*(map(json.loads, lines.splitlines()) for lines in printed.values())):
        for who, own in zip(parts, (line, other)):
            figures.add((who, line["way"], line["model"]), statistics.median(own["medians_us"]))
        speeds = [cpp / python for cpp, python in zip(line["medians_us"], other["medians_us"])]
        figures.add(("flow, part in Python", line["way"], line["model"], "ratio"), statistics.median(speeds))


def parts_rows(figures):
    for model in PARTS_MODELS:
        for way in PARTS_CLASSES:
            cpp, python = (figures.median(f"flow, {part}", way, model) for part in ("C++ part", "part in Python"))
            ratio = figures.median("flow, part in Python", way, model, "ratio")
            yield row(f"{way}, {model}, the part in Python, against that in C++", python, cpp, at_least=0.7, ratio=ratio)


def rows(figures, name, shown, ways, who="flow, backend"):
    """Of one measurement a row for each way, with the ratio to gloo that is to be reached."""
    gloo = figures.median(who, "gloo", name)
    for way, (words, at_least) in ways.items():
        own, ratio = (figures.median(who, way, name, *kind) for kind in ((), ("ratio",)))
        yield row(f"{shown}, {words}, against gloo", own, gloo, at_least=at_least, ratio=ratio)


def all_reduce_rows(figures, size, at_least, beside="", **who):
    ways = {"flow": ("ordinary memory", 1), "flow, shared memory": ("shared memory", at_least)}
    return rows(figures, f"all-reduce {size}", f"dist.all_reduce {size_name(size)}{beside}", ways, **who)


def step_rows(figures, model, at_least, beside="", **who):
    ways = {"flow": ("PyTorch's DDP", 1), "flow_torch": ("flow_torch's DDP", at_least)}
    return rows(figures, f"DDP {model}", f"PyTorch's step, {model}{beside}", ways, **who)


def table(figures):
    def median(way, name):
        return figures.median("flow, backend", way, name)

    for size in SIZES:
        yield from all_reduce_rows(figures, size, 15 if size in LARGE else 1)
        if size in LARGE:
            own, limit = median("flow, shared memory", f"all-reduce {size}"), figures.median("flow", "limit", size)
            yield row(f"dist.all_reduce {size_name(size)}, shared memory, against the zero-copy limit", own, limit)
    for model, at_least in STEP_TO_REACH.items():
        yield from step_rows(figures, model, at_least)
        own, local = (median(way, f"DDP {model}") for way in ("flow_torch", "local"))
        yield row(f"PyTorch's step, {model}, flow_torch's DDP, against a step without", own, local)
    yield from parts_rows(figures)
    for model in SHARDED:
        name, shown = f"FSDP2 {model}", f"PyTorch's step, fully_shard of {model}"
        ways = {"flow": ("ordinary memory", 1), "flow, shared memory": ("memory from the group", 2.8)}
        yield from rows(figures, name, shown, ways)
        own, none = (median(way, name) for way in ("flow, shared memory", "no communication"))
        yield row(f"{shown}, memory from the group, against no communication at all", own, none)
    for loops in BUSY_LOOPS:
        busy = {"beside": f" beside {loops} busy loop(s)", "who": f"flow, backend, {loops}"}
        for size in BUSY_SIZES:
            yield from all_reduce_rows(figures, size, 1, **busy)
        for model in BUSY_MODELS:
            yield from step_rows(figures, model, 1, **busy)
