"""The benches of sharded training, for `scripts/bench`."""

from measure import PEERS, ROOT, flow_launch, row, run, torchrun_command

# By how much a step with Fsdp is to be faster than one with Ddp.
TO_REACH = {
    ("wide", "adam"): 1.3,
    ("wide", "sgd"): 1,
    ("mlp", "adam"): 1.15,
    ("mlp", "sgd"): 1,
    ("lenet", "adam"): 1,
    ("lenet", "sgd"): 1,
    ("mobilenet", "adam"): 1,
    ("mobilenet", "sgd"): 1,
}
MODELS = list(dict.fromkeys(model for model, _ in TO_REACH))
STEPS = {"mlp": 50}  # of a block


def one_round(figures, python):
    for model in MODELS:
        command = "flow-bench", "sharded", "--json", "--model", model, "--blocks", 10, "--steps", STEPS.get(model, 5)
        figures.add_lines("flow", flow_launch(2, *command)[0])
    if python:
        command = torchrun_command(python, 2, PEERS / "sharded.py", *MODELS)
        figures.add_lines("torch", run("env", f"PYTHONPATH={ROOT / 'pytorch'}", *command)[0])


def table(figures):
    for (model, optimizer), at_least in TO_REACH.items():
        ddp, fsdp, speedup = (figures.median("flow", "sharded", model, optimizer, what) for what in ("ddp", "fsdp", "speedup"))
        name = f"step with Fsdp, {model}, {optimizer}"
        yield row(f"{name}, against Ddp", fsdp, ddp, at_least=at_least, ratio=speedup)
        for backend in "gloo", "flow":
            peer = figures.median("torch", "fsdp2", model, optimizer, backend)
            is_aim = (model, optimizer, backend) == ("wide", "adam", "gloo")
            yield row(f"{name}, against FSDP2 over {backend}", fsdp, peer, at_least=3 if is_aim else None)
