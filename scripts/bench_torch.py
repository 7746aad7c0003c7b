"""The benches of PyTorch over Flow, for `scripts/bench`."""

import json
import os

from measure import MIB, PEERS, ROOT, row, run, size_name, torchrun_command

SIZES = [4, 1 << 10, 64 << 10, 256 << 10, MIB, 4 * MIB, 25 * MIB, 100 * MIB, 256 * MIB]
STEP_TO_REACH = {"mlp": 2.9, "wide": 1.8, "lenet": 1.2, "mobilenet": 1}
SHARDED = ["wide", "GPT block"]
QUICK = ["--blocks", 3]


def one_round(figures, python, is_quick):
    headers = os.environ.get("FLOW_TORCH_INCLUDE", ROOT / ".libtorch" / "include")
    environment = f"PYTHONPATH={ROOT / 'pytorch'}", f"FLOW_TORCH_INCLUDE={headers}"
    names = "--sizes", ",".join(map(str, SIZES)), "--models", ",".join(STEP_TO_REACH), "--sharded", ",".join(SHARDED)
    program = PEERS / "backends.py", *names, *(QUICK if is_quick else [])
    for line in run("env", *environment, *torchrun_command(python, 2, *program))[0].splitlines():
        line = json.loads(line)
        key = "flow, backend", line["way"], line["name"]
        figures.add(key, line["median_us"])
        figures.add((*key, "ratio"), line["ratio"])


def rows(figures, name, shown, ways):
    """Of one measurement a row for each way, with the ratio to gloo that is to be reached."""
    gloo = figures.median("flow, backend", "gloo", name)
    for way, (words, at_least) in ways.items():
        own, ratio = (figures.median("flow, backend", way, name, *kind) for kind in ((), ("ratio",)))
        yield row(f"{shown}, {words}, against gloo", own, gloo, at_least=at_least, ratio=ratio)


def table(figures):
    for size in SIZES:
        at_least = 15 if size >= MIB else 1
        ways = {"flow": ("ordinary memory", 1), "flow, shared memory": ("shared memory", at_least)}
        yield from rows(figures, f"all-reduce {size}", f"dist.all_reduce {size_name(size)}", ways)
    for model, at_least in STEP_TO_REACH.items():
        ways = {"flow": ("PyTorch's DDP", 1), "flow_torch": ("flow_torch's DDP", at_least)}
        yield from rows(figures, f"DDP {model}", f"PyTorch's step, {model}", ways)
        own, local = (figures.median("flow, backend", way, f"DDP {model}") for way in ("flow_torch", "local"))
        yield row(f"PyTorch's step, {model}, flow_torch's DDP, against a step without", own, local)
    for model in SHARDED:
        ways = {"flow": ("ordinary memory", 1), "flow, shared memory": ("memory from the group", 2.8)}
        yield from rows(figures, f"FSDP2 {model}", f"PyTorch's step, fully_shard of {model}", ways)
