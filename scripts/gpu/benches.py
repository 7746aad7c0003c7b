"""What is to be fast on a GPU, with the aims."""

import json
import statistics
from functools import partial

from programs import CannotRun, Failed, json_line

MODELS = ["mlp", "lenet", "mobilenet", "resnet50", "gpt"]
QUICK_MODELS = ["mlp", "resnet50"]
REHEARSED_MODELS = ["mlp", "lenet"]
TIMELINES = {"resnet50", "gpt"}


def benches(quick, rehearsal):
    """Pairs of a name and a function of the programs, which returns rows, and timelines."""
    models = REHEARSED_MODELS if rehearsal else QUICK_MODELS if quick else MODELS
    rounds = 1 if quick or rehearsal else 2
    yield "packing against a copy", pack
    yield "host time of a bucket's launch", launch
    for model in models:
        yield f"step of {model}, 1 rank", partial(alone, model)
    for model in models:
        timeline = model in TIMELINES or rehearsal
        yield f"step of {model}, 2 ranks, against PyTorch DDP", partial(against_pytorch, model, rounds, timeline)


def row(name, flow, other, ratio, at_least=None, at_most=None, value=None, unit=""):
    """A line of the table. The bounds are for `value`, or else the ratio."""
    value = ratio if value is None else value
    aim = reached = ""
    if at_least is not None:
        aim, reached = f">= {at_least:g}{unit}", value >= at_least
    elif at_most is not None:
        aim, reached = f"<= {at_most:g}{unit}", value <= at_most
    reached = {True: "yes", False: "NO", "": ""}[reached]
    return [name, flow, other, "" if ratio is None else f"{ratio:.3f}", aim, reached]


def pack(programs):
    if programs.rehearsal:
        raise CannotRun("fakes would take an hour")
    rows = []
    for result in json_line(programs.flow(0, "cuda_check", "--bench", "--json"))["results"]:
        name = f"{result['operation']} {result['count']} x {result['tensors']} to {result['flat']}, against a copy"
        flow, copy = (f"{result[rate]:.0f} GB/s" for rate in ("gb_per_s", "copy_gb_per_s"))
        rows.append(row(name, flow, copy, result["ratio"], at_least=0.9 if result["operation"] == "pack" else None))
    return rows, {}


def launch(programs):
    rows = []
    for ranks in (1, 2):
        us = json_line(programs.flow(ranks, "flow-bench", "launch", "--json"))["median_us"]
        name = f"host time of a bucket's launch, 30 gradients of 25 MiB in all, world size {ranks}"
        rows.append(row(name, f"{us:.2f} us", "", None, at_most=10, value=us, unit=" us"))
    return rows, {}


def flow_step(programs, ranks, model, *options):
    if programs.rehearsal:
        options += ("--steps", 5)
    options = ("--device", "cuda", "--model", model, "--json", *options)
    return json_line(programs.flow(ranks, "flow-bench", "step", *options))


def alone(model, programs):
    line = flow_step(programs, 1, model)
    local, ddp = line["local_ms"], line["ddp_ms"]
    name = f"step of {model}, world size 1, Ddp against plain"
    return [row(name, ms(ddp), ms(local), ddp / local, at_most=1.01)], {}


def against_pytorch(model, rounds, with_timeline, programs):
    file = programs.out / f"timeline-{model}.json"
    options = ("--timeline", file) if with_timeline else ()
    flow, torch = [], []
    for _ in range(rounds):
        flow.append(flow_step(programs, 2, model, *options))
        torch.append(json_line(programs.pytorch(2, "step.py", model)))
    if flow[0]["parameters"] != torch[0]["parameters"]:
        raise Failed(f"{model} has {flow[0]['parameters']} parameters here, PyTorch's {torch[0]['parameters']}")

    def medians(name):
        return [statistics.median(line[name] for line in lines) for lines in (flow, torch)]

    (ddp, torch_ddp), (local, torch_local) = medians("ddp_ms"), medians("local_ms")
    name = f"step of {model}, 2 ranks"
    rows = [
        row(f"{name}, Ddp against PyTorch DDP", ms(ddp), ms(torch_ddp), torch_ddp / ddp, at_least=1),
        row(f"{name}, each its own, against PyTorch", ms(local), ms(torch_local), torch_local / local),
    ]
    if not with_timeline:
        return rows, {}
    backward, *buckets = json.loads(file.read_text())["traceEvents"]
    hidden = [bucket["args"]["behind_us"] / bucket["dur"] if bucket["dur"] else 1.0 for bucket in buckets]
    inside = sum(bucket["ts"] + bucket["dur"] <= backward["dur"] for bucket in buckets)
    name = f"reductions of {model} over before backward is, of {len(buckets)}"
    rows.append(row(name, str(inside), "", None, at_least=1, value=inside))
    timeline = [
        [bucket["name"], mib(bucket["args"]["bytes"]), ms(bucket["ts"] / 1e3), ms((bucket["ts"] + bucket["dur"]) / 1e3)]
        + [ms(backward["dur"] / 1e3), f"{share:.0%}"]
        for bucket, share in zip(buckets, hidden)
    ]
    return rows, {model: timeline}


def ms(value):
    return f"{value:.3g} ms" if value < 1000 else f"{value:.0f} ms"


def mib(size):
    return f"{size / (1 << 20):.3g} MiB"
