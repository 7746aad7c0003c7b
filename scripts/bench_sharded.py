"""The benches of sharded training, for `scripts/bench`."""

from measure import PEERS, ROOT, flow_launch, row, run, torchrun_command

# By how much a step with Fsdp is to be faster than one with Ddp: model, optimizer and ranks.
TO_REACH = {
    ("wide", "adam", 2): 1.3,
    ("wide", "sgd", 2): 1,
    ("mlp", "adam", 2): 1.15,
    ("mlp", "sgd", 2): 1,
    ("lenet", "adam", 2): 1,
    ("lenet", "sgd", 2): 1,
    ("mobilenet", "adam", 2): 1,
    ("mobilenet", "sgd", 2): 1,
    ("gpt", "adam", 2): 1,
    ("gpt", "sgd", 2): None,
    ("wide", "adam", 4): 1.3,
    ("wide", "sgd", 4): 1,
    ("mlp", "adam", 4): 1.15,
    ("mlp", "sgd", 4): None,
}
JOBS = list(dict.fromkeys((model, ranks) for model, _, ranks in TO_REACH))
# Blocks, and steps of each. A step of the GPT takes seconds.
LENGTHS = {"mlp": (10, 50), "gpt": (3, 1)}
LENGTH = 10, 5
MEMORY_ROUNDS = 3
MEMORY_TO_REACH = 1.1  # of one process's


def one_round(figures, python):
    for model, ranks in JOBS:
        blocks, steps = LENGTHS.get(model, LENGTH)
        command = "flow-bench", "sharded", "--json", "--model", model, "--blocks", blocks, "--steps", steps
        figures.add_lines("flow", flow_launch(ranks, *command)[0])
    for optimizer in ("adam", "sgd"):
        for ranks in (1, 2, 4) * MEMORY_ROUNDS:
            command = "flow-bench", "sharded-memory", "--json", "--optimizer", optimizer
            figures.add_lines("flow", flow_launch(ranks, *command)[0])
    if python:
        for model in (model for model, ranks in JOBS if ranks == 2):
            blocks, steps = LENGTHS["gpt"] if model == "gpt" else LENGTH
            words = PEERS / "sharded.py", "--blocks", blocks, "--steps", steps, model
            command = torchrun_command(python, 2, *words)
            figures.add_lines("torch", run("env", f"PYTHONPATH={ROOT / 'pytorch'}", *command)[0])


def memory_row(figures, optimizer, ranks):
    fsdp, alone = (figures.median("flow", "memory", optimizer, count) for count in (ranks, 1))
    ratio = fsdp / alone
    reached = "yes" if ratio <= MEMORY_TO_REACH else "NO"
    name = f"memory of {ranks} ranks with Fsdp, wide, {optimizer}, against one process"
    return [name, f"{fsdp:.0f} MiB", f"{alone:.0f} MiB", f"{ratio:.2f}", f"ratio <= {MEMORY_TO_REACH}", reached]


def table(figures):
    for (model, optimizer, ranks), at_least in TO_REACH.items():
        key = "flow", "sharded", model, optimizer, ranks
        ddp, fsdp, speedup = (figures.median(*key, what) for what in ("ddp", "fsdp", "speedup"))
        name = f"step with Fsdp, {model}, {optimizer}" + ("" if ranks == 2 else f", {ranks} ranks")
        yield row(f"{name}, against Ddp", fsdp, ddp, at_least=at_least, ratio=speedup)
        if ranks != 2:
            continue
        for backend in "gloo", "flow":
            peer = figures.median("torch", "fsdp2", model, optimizer, backend)
            is_aim = (model, optimizer, backend) == ("wide", "adam", "gloo")
            yield row(f"{name}, against FSDP2 over {backend}", fsdp, peer, at_least=3 if is_aim else None)
    for optimizer in ("adam", "sgd"):
        for ranks in (2, 4):
            yield memory_row(figures, optimizer, ranks)
