"""What must be right on a GPU."""

import os
import re
from functools import partial

from programs import BUNDLE, CannotRun, Failed, json_line

# About the CPU's shared memory and cores, ranks that are killed, calls that only hosts compare, or only the fake can check it.
DDP_NOT_ON_GPUS = {
    "wrapped_again", "joined_again", "waits", "no_memory", "who_reduces", "beside_the_stream", "allocator",
    "survivors_name_a_killed_stage", "optimizer_in_backward_memory", "zero_memory", "mixed_precision_memory",
    "mixed_precision_differing", "local_sgd_out_of_step", "join_of_some_ranks",
}
# These have two pipelines of two ranks.
ON_FOUR_RANKS = {"trained_with_replicas"}
# Options of gpt, and the ranks that they ask for.
GPT_LAYOUTS = {"": 1, "--tp 2": 2, "--pp 2": 2, "--dp 2 --pp 2": 4}
MNIST_STEPS = 400
FIRST_STEPS = 10
# Ways to fail, and what rank 0 says of each.
FAILURES = {
    "late": ["all_reduce #4 (1000 x f32, sum), 4000 bytes, over NCCL timed out", "waited for rank 1"],
    "late_bucket": ["bucket 7), 2096 bytes, over NCCL timed out", "waited for rank 1"],
    "mismatch": ["ranks disagree", "rank 0 called all_reduce", "rank 1 called broadcast"],
    "dies": ["failed: rank 1", "died"],
    "aborts": ["rank 1 aborted the group: the data ran out"],
    "never_joins": ["timed out", "rank 1"],
    "a_program_that_ignores_a_failure_is_ended": ["so its process ends here"],
}


# Scenarios of tests/scenarios.
NCCL = [
    ("collectives", "collectives::all_are_right_over_nccl"),
    ("buckets", "nccl::buckets"),
    ("groups", "nccl::groups"),
]


def checks(about, quick):
    """Pairs of a name and a function of the programs, which returns the text to report, or raises."""
    yield "kernels against references, on fresh random numbers", kernels
    for ranks in (1, 2, 4):
        for what, name in NCCL[: 2 if ranks == 1 else 3]:
            yield f"NCCL: {what}, {named(ranks)}", partial(scenario, nproc=ranks, worker="worker", name=name)
    for way, expected in FAILURES.items():
        yield f"failure: {way}", partial(failure, way, expected)
    yield "more ranks than GPUs", too_many
    yield "--nproc_per_node gpu", as_many
    for ranks in (1, 2):
        yield f"train, {named(ranks)}, against the CPU", partial(train, ranks)
    for ranks in (1, 2):
        yield f"mnist, {named(ranks)}, against the CPU", partial(mnist, ranks, 100 if quick else MNIST_STEPS)
    for layout, ranks in GPT_LAYOUTS.items():
        yield f"{f'gpt {layout}'.strip()}, {named(ranks)}, against the CPU", partial(gpt, layout, ranks)
    for model in ("mlp", "lenet"):
        for ranks in (1, 2):
            yield f"losses of {model}, {named(ranks)}, against PyTorch DDP", partial(losses, model, ranks)
    for check in about["ddp_checks"]:
        if check not in DDP_NOT_ON_GPUS:
            yield f"Ddp: {check}, 2 ranks", partial(ddp, f"ddp::{check}", 2)
    yield "Ddp: mlp, 4 ranks", partial(ddp, "ddp::mlp", 4)
    for check in about["tensor_checks"]:
        if check not in DDP_NOT_ON_GPUS:
            yield f"tensors: {check}, 2 ranks", partial(ddp, f"tensors::{check}", 2)
    for check in about["global_checks"]:
        for ranks in (2, 4):
            yield f"global tensors: {check}, {ranks} ranks", partial(ddp, f"globals::{check}", ranks)
    for check in about["pipeline_checks"]:
        if check not in DDP_NOT_ON_GPUS:
            for ranks in (4,) if check in ON_FOUR_RANKS else (2, 4):
                yield f"pipelines: {check}, {ranks} ranks", partial(ddp, f"pipelines::{check}", ranks)


def named(ranks):
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def kernels(programs):
    return programs.flow(0, "cuda_check").splitlines()[-1]


def scenario(programs, nproc, worker, name, ranks=None, **variables):
    """Runs a scenario of a worker program, which every rank must report as passed."""
    lines = programs.flow(nproc, worker, name, **variables).splitlines()
    ranks = ranks or nproc
    if lines != [f"{name} passed"] * ranks:
        raise Failed("\n".join(lines))
    return f"passed on {named(ranks)}"


def failure(way, expected, programs):
    try:
        output = programs.pair(f"gpu-check-{os.getpid()}-{way}", "worker", f"nccl::failures::{way}")
    except Failed as error:
        output = str(error)
    missing = [words for words in expected if words not in output]
    if missing:
        raise Failed(f"{missing[0]!r} is not in: {output[:400]}")
    return output.splitlines()[0]


def too_many(programs):
    found, asked = programs.gpus, programs.gpus + 1
    expected = f"asked for {asked} ranks with a GPU each on this machine, found {found} GPU"
    try:
        programs.flow(asked, "worker", NCCL[0][1], FLOW_TEST_SHARE_GPUS="0")
    except Failed as error:
        if expected in str(error):
            return expected + "s" * (found != 1)
        raise
    raise Failed(f"{asked} ranks work on {found} GPUs")


def as_many(programs):
    if programs.rehearsal:
        raise CannotRun("flow-launch counts real GPUs")
    return scenario(programs, "gpu", "worker", "nccl::buckets", ranks=programs.gpus)


def ddp(check, ranks, programs):
    return scenario(programs, ranks, "ddp_worker", check, FLOW_TEST_DEVICE="cuda")


def train(ranks, programs):
    def run(device):
        lines = programs.flow(ranks, "train", "--device", device).splitlines()
        found = [float(line.rpartition("loss:")[2]) for line in lines if "loss:" in line]
        return found, sorted(line for line in lines if line.startswith("w: "))

    (losses, w), (expected, expected_w) = run("cuda"), run("cpu")
    # The ranks' lines come in any order.
    compare("the first losses", sorted(losses)[-ranks:], sorted(expected)[-ranks:], 1e-3)
    if w != expected_w:
        raise Failed(f"found {w}, on the CPU {expected_w}")
    return w[0]


def mnist(ranks, steps, programs):
    data = BUNDLE / "fashion-mnist"
    if not data.is_dir():
        raise CannotRun("the bundle was made without Fashion-MNIST (scripts/setup --data)")

    def run(device):
        file = programs.out / f"losses-{device}-{ranks}.txt"
        options = ("--device", device, "--data", data, "--steps", steps, "--losses", file)
        output = programs.flow(ranks, "mnist", *options)
        losses = [float(line) for line in file.read_text().split()]
        file.unlink()
        return losses[:FIRST_STEPS], float(re.findall(r"accuracy ([0-9.]+) %", output)[-1])

    (losses, accuracy), (expected, expected_accuracy) = run("cuda"), run("cpu")
    compare("the first losses", losses, expected, 0.02)
    if abs(accuracy - expected_accuracy) > 1.5:
        raise Failed(f"test accuracy {accuracy} %, on the CPU {expected_accuracy} %")
    return f"test accuracy {accuracy} %, on the CPU {expected_accuracy} %"


def gpt(layout, ranks, programs):
    """With recomputation and validation; the text is this file."""
    sizes = "--layers 2 --width 64 --heads 4 --context 32 --batch-size 8 --micro-batches 2 --steps 20 --dropout 0.1"

    def run(device):
        file = programs.out / f"gpt-losses-{device}{layout.replace(' ', '')}.txt"
        options = [*layout.split(), "--device", device, "--text", __file__, "--losses", file, "--recompute"]
        output = programs.flow(ranks, "gpt", *sizes.split(), *options, "--validate-every", 20)
        losses = [float(line) for line in file.read_text().split()]
        file.unlink()
        return [*losses, float(re.findall(r"validation loss ([0-9.]+)", output)[-1])]

    furthest = compare("the losses", run("cuda"), run("cpu"), 5e-3)
    return f"losses differ by {furthest:.1e} at most, relatively"


def losses(model, ranks, programs):
    output = programs.flow(ranks, "flow-bench", "losses", "--model", model, "--device", "cuda")
    found = json_line(output)["losses"]
    expected = json_line(programs.pytorch(ranks, "losses.py", model))["losses"]
    furthest = compare("the losses", found, expected, 2e-3)
    return f"{len(found)} losses differ by {furthest:.1e} at most, relatively"


def compare(what, found, expected, tolerance):
    """Returns the largest relative difference."""
    if not found or len(found) != len(expected):
        raise Failed(f"{what}: {len(found)} of them, not {len(expected)}")
    differences = [abs(f - e) / abs(e) for f, e in zip(found, expected)]
    if not max(differences) <= tolerance:
        raise Failed(f"{what} are {found}, not {expected}, within {tolerance:g}")
    return max(differences)
