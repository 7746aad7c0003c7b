"""The bench of checkpoints, for `scripts/bench`."""

from measure import flow_launch, row


def one_round(figures):
    for bench in "checkpoints", "global-checkpoints":
        figures.add_lines("flow", flow_launch(2, "flow-bench", bench, "--json", "--folder", "target")[0])
    figures.add_lines("flow", flow_launch(2, "flow-bench", "in-memory-checkpoints", "--json")[0])


def table(figures):
    for name, peer in ("save", "dd_write"), ("load", "dd_read"):
        flow, dd = (figures.median("flow", "checkpoints", what) for what in (name, peer))
        yield row(f"{name} a model and its Adam, 2 GB, against dd", flow, dd, at_least=0.8)
    begun, copy = (figures.median("flow", "checkpoints", what) for what in ("async_save", "copy"))
    yield row("stall of a save beside the training, against a copy in memory", begun, copy, at_least=1 / 1.1)
    stall, copy = (figures.median("flow", "in-memory-checkpoints", what) for what in ("stall", "copy"))
    yield row("stall of a save in flow-launch's memory, against a copy", stall, copy, at_least=1 / 1.1)
    resume, read = (figures.median("flow", "checkpoints", what) for what in ("resume", "dd_read"))
    yield row("resume 2 GB from flow-launch's memory, against dd", resume, read)
    begun, kept, copy = (figures.median("flow", "global-checkpoints", what) for what in ("async_save", "in_memory", "copy"))
    yield row("stall of a save of global tensors beside the training, against a copy", begun, copy, at_least=1 / 1.1)
    yield row("stall of a save of global tensors in flow-launch's memory, against a copy", kept, copy, at_least=1 / 1.1)
