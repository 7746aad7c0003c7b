"""What is to be fast on a GPU, with the aims."""

import json
import re
import statistics
from functools import partial

from programs import CannotRun, Failed, json_line

MODELS = ["mlp", "lenet", "mobilenet", "resnet50", "gpt"]
QUICK_MODELS = ["mlp", "resnet50"]
REHEARSED_MODELS = ["mlp", "lenet"]
TIMELINES = {"resnet50", "gpt"}
PIPELINES = ["1f1b", "interleaved", "zb-h1", "zb-v"]
PEERS_PIPELINES = ["1f1b", "interleaved"]
PIPELINE = "--micro-batches 8 --layers 16 --width 2048 --rows 1024"
REHEARSED_PIPELINE = "--micro-batches 4 --layers 4 --width 8 --rows 2"
GPT = "--layers 8 --width 1024 --heads 16 --context 256 --batch-size 32 --micro-batches 4 --steps 20"
REHEARSED_GPT = "--layers 2 --width 16 --heads 2 --context 8 --batch-size 8 --micro-batches 2 --steps 2"
GPT_LAYOUTS = {"--tp 2": 2, "--pp 2": 2, "--dp 2 --pp 2": 4, "--dp 2 --tp 2": 4}


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
    yield "step of a pipeline, 2 ranks, against torch.distributed.pipelining", partial(pipeline, rounds)
    yield "step of the example gpt on layouts of 2 and 4 ranks", gpt


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


def pipeline(rounds, programs):
    sizes = (REHEARSED_PIPELINE if programs.rehearsal else PIPELINE).split()
    flow = {name: [] for name in PIPELINES}
    torch = {name: [] for name in PEERS_PIPELINES}
    for _ in range(rounds):
        output = programs.flow(2, "flow-bench", "pipeline", "--json", "--device", "cuda", "--schedules", ",".join(flow), *sizes)
        output += programs.pytorch(2, "pipeline.py", "--schedules", ",".join(torch), *sizes)
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        for line in lines[: len(flow)]:
            flow[line["schedule"]].append(line)
        for line in lines[len(flow) :]:
            torch[line["schedule"]].append(line)
    rows = []
    for name, lines in flow.items():
        step, ideal = (statistics.median(line[what] for line in lines) for what in ("step_ms", "ideal_ms"))
        rows.append(row(f"step of a pipeline, {name}, 2 ranks, against its work alone", ms(step), ms(ideal), ideal / step))
        if name in torch:
            other = statistics.median(line["step_ms"] for line in torch[name])
            title = f"step of a pipeline, {name}, 2 ranks, against torch.distributed.pipelining"
            rows.append(row(title, ms(step), ms(other), other / step, at_least=1))
    return rows, {}


def gpt(programs):
    sizes = (REHEARSED_GPT if programs.rehearsal else GPT).split()

    def step(layout, ranks):
        output = programs.flow(ranks, "gpt", *sizes, *layout.split(), "--device", "cuda", "--text", __file__)
        return float(re.findall(r"([0-9.]+) ms a step", output)[-1])

    alone = step("", 1)
    rows = []
    for layout, ranks in GPT_LAYOUTS.items():
        hybrid = step(layout, ranks)
        rows.append(row(f"step of gpt {layout}, {ranks} ranks, against 1 rank", ms(hybrid), ms(alone), alone / hybrid))
    return rows, {}


def ms(value):
    return f"{value:.3g} ms" if value < 1000 else f"{value:.0f} ms"


def mib(size):
    return f"{size / (1 << 20):.3g} MiB"
