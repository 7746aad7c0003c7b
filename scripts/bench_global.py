"""The benches of global tensors, for `scripts/bench`."""

from measure import MIB, PEERS, RELEASE, flow_launch, row, run, size_name, torchrun

RANKS = {1: "1 rank", 2: "2 ranks"}
OPERATIONS = ["add", "mm", "relu", "view"]
STEP = "MLP step with Adam"
SIZES = [16 * MIB]


def one_round(figures, python, models):
    figures.add_lines("flow", run(RELEASE / "flow-bench", "overhead", "--json")[0])
    figures.add_lines("flow", flow_launch(2, "flow-bench", "overhead", "--json")[0])
    boxing = ["flow-bench", "boxing", "--json", "--sizes", ",".join(map(str, SIZES))]
    for _ in range(3):  # short
        figures.add_lines("flow", flow_launch(2, *boxing)[0])
    if python:
        for ranks in RANKS:
            figures.add_lines("torch", torchrun(python, ranks, PEERS / "overhead.py")[0])
        figures.add_lines("torch", torchrun(python, 2, PEERS / "boxing.py", *SIZES)[0])
    for model in models:
        figures.add_lines("flow", flow_launch(2, "flow-bench", "sbp", "--json", "--model", model)[0])


def step_row(figures, ranks):
    """How many times as long a step takes as on plain tensors."""
    flow, torch = (figures.median(who, "overhead", STEP, ranks, "ratio") for who in ("flow", "torch"))
    shown = ["" if value is None else f"{value:.2f}" for value in (flow, torch, torch and torch / flow)]
    reached = "yes" if flow <= 1.15 else "NO"
    name = f"{STEP}, {RANKS[ranks]}, times as long as on plain tensors, against DTensor"
    return [name, *shown, "<= 1.15", reached]


def table(figures, models):
    for ranks in RANKS:
        for operation in OPERATIONS:
            flow, torch = (figures.median(who, "overhead", operation, ranks) for who in ("flow", "torch"))
            name = f"overhead of {operation}, forward, {RANKS[ranks]}, against DTensor"
            yield row(name, flow, torch, at_most=0.6)
        yield step_row(figures, ranks)
    for size in SIZES:
        boxing = [key for key in figures if key[:2] == ("flow", "boxing") and key[3:] == (size,)]
        for _, *key in boxing:
            pair = key[1]
            flow, name = figures.median("flow", *key), f"{pair.replace(' > ', ' to ')}, {size_name(size)}"
            limit, ratio = (figures.median("flow", *key, what) for what in ("limit", "ratio"))
            yield row(f"{name}, against memory copies of what it needs", flow, limit, at_least=0.8, ratio=ratio)
            if ("torch", *key) in figures:
                yield row(f"{name}, against DTensor's redistribute", flow, figures.median("torch", *key))
    for model in models:
        sbp, ddp = (figures.median("flow", name, model) for name in ("sbp", "ddp"))
        ratio = figures.median("flow", "sbp", model, "ratio")
        yield row(f"step by SBP, {model}, against Ddp", sbp, ddp, at_least=0.97, ratio=ratio)
