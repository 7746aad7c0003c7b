"""The benches of pipelines, tensor and hybrid parallelism, for `scripts/bench`."""

import os
import re

from measure import PEERS, RELEASE, fail, flow_launch, row, run, torchrun

BLOCKS = [(256, 128), (512, 256), (768, 256)]  # width and tokens
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
# PyTorch has no ZB-H1. Its ZB-V sends to the rank itself, which gloo cannot.
PEERS_SCHEDULES = ["gpipe", "1f1b", "interleaved"]
PIPELINE = "--micro-batches", 8
GPT = "--layers", 4, "--width", 256, "--heads", 8, "--context", 128, "--batch-size", 16, "--steps", 16
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]  # dp, tp, pp


def gpt_step(output):
    """What the example gpt says that a step took, in us."""
    times = re.findall(r"([\d.]+) ms a step", output)
    return float(times[-1]) * 1e3 if times else fail(f"gpt printed no time:\n{output}")


def one_round(figures, python):
    for width, tokens in BLOCKS:
        command = "flow-bench", "gpt", "--json", "--width", width, "--tokens", tokens
        figures.add_lines("flow", flow_launch(2, *command)[0])
        if python:
            figures.add_lines("torch", torchrun(python, 2, PEERS / "gpt.py", width, tokens)[0])
    for _ in range(3):  # short
        command = "flow-bench", "pipeline", "--json", "--schedules", ",".join(SCHEDULES), *PIPELINE
        figures.add_lines("flow", flow_launch(2, *command)[0])
        if python:
            command = PEERS / "pipeline.py", "--schedules", ",".join(PEERS_SCHEDULES), *PIPELINE
            figures.add_lines("torch", torchrun(python, 2, *command)[0])
    threads = os.cpu_count()
    for layout in LAYOUTS:
        dp, tp, pp = layout
        ranks = dp * tp * pp
        alone = run("env", f"OMP_NUM_THREADS={min(ranks, threads)}", RELEASE / "gpt", *GPT)[0]
        words = "--dp", dp, "--tp", tp, "--pp", pp, "--micro-batches", 1 if pp == 1 else 4
        hybrid = flow_launch(ranks, "gpt", *GPT, *words)[0]
        alone, hybrid = gpt_step(alone), gpt_step(hybrid)
        for key, value in (("alone", alone), ("hybrid", hybrid), ("ratio", alone / hybrid)):
            figures.add(("flow", key, layout), value)


def table(figures):
    for width, tokens in BLOCKS:
        parallel, alone, ratio = (
            figures.median("flow", "gpt", width, tokens, what) for what in ("parallel", "alone", "ratio")
        )
        name = f"step of a GPT block, width {width}, {tokens} tokens"
        yield row(f"{name}, against one process with 2 threads", parallel, alone, at_least=0.91, ratio=ratio)
        yield row(f"{name}, against DTensor", parallel, figures.median("torch", "gpt", width, tokens, "parallel"), at_least=1)
    for schedule in SCHEDULES:
        key = "pipeline", schedule, 2
        step, efficiency, limit = (figures.median("flow", *key, what) for what in ("step", "efficiency", "limit"))
        ratio = efficiency / limit
        shown = f"{efficiency:.2f}", f"{limit:.2f}", f"{ratio:.2f}"
        reached = "yes" if ratio >= 0.9 else "NO"
        yield [f"pipeline efficiency, {schedule}, against 1 - bubble", *shown, "ratio >= 0.9", reached]
        if schedule in PEERS_SCHEDULES:
            torch = figures.median("torch", *key, "step")
            yield row(f"step of a pipeline, {schedule}, against torch.distributed.pipelining", step, torch, at_least=1)
    for layout in LAYOUTS:
        alone, hybrid, ratio = (figures.median("flow", key, layout) for key in ("alone", "hybrid", "ratio"))
        dp, tp, pp = layout
        ranks = dp * tp * pp
        threads = min(ranks, os.cpu_count())
        name = f"step of gpt, {ranks} ranks, dp {dp} x tp {tp} x pp {pp}"
        yield row(f"{name}, against one process with {threads} threads", hybrid, alone, at_least=0.9, ratio=ratio)
