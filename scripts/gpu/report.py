"""results.json, and the page made of it: docs/gpu-results.md."""

import json

REHEARSAL = "**A rehearsal on fakes of the driver and NCCL: no GPU result.**\n\n"

MEASURED = """\
## How it is measured

- Ranks that are more than the machine's GPUs share them. To NCCL each then looks like a host of its own (`NCCL_HOSTID`), so
  that they reach each other through the network stack, Flow's as PyTorch's: these steps say how the two compare, and
  nothing of how fast two GPUs are.
- A **step** is zero_grad, forward and backward, with Flow's and PyTorch's models of the same shapes, with as many
  parameters (compared in each run) and on inputs of the same shape. The optimizer is left out: it is libtorch's own in both
  and takes another way in C++ than in Python by default. Flow's `Ddp` and PyTorch DDP have their default options; matrix
  products are in f32, convolutions may use TF32, in both. A block of steps, some quarter of a second, is timed from an idle
  device to an idle device; ten such blocks without `Ddp` and ten with it take turns, and the median counts; Flow and PyTorch
  take turns too, twice (once with `--quick`), and the table has the medians of that. "Each its own" is the same without any
  communication.
- Models: MLP 784-512-10, batch 50; LeNet on 28 x 28, batch 50; MobileNetV2 on 32 x 32, batch 32; ResNet-50 on 224 x 224,
  batch 32; a GPT-2 block (width 1024, 16 heads, 1024 tokens), batch 8.
- A **pipeline** has 16 linear layers of width 2048 with ReLU, and 8 micro-batches of 1024 rows; "its work alone" is what a rank
  computes in a step, on all ranks at once. Its blocks are five steps. **gpt** is the example program with 8 blocks of width 1024,
  and a batch of 32 samples of 256 bytes in 4 micro-batches; its time is the mean of 20 steps.
- **Packing** moves 25 MiB; its rate counts every byte read and written, as that of the copy beside it.
- **Launch** is the median time that the call takes on the host, with a device that keeps up.
- **Reductions inside backward**: rank 0's last backward, by the device's clock from its first gradient on.
- Ratios are other / Flow for steps against PyTorch, of pipelines and of gpt, Ddp / plain at world size 1, and Flow / copy for
  packing.
"""


def table(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |\n" for cells in lines) + "\n"


def write(out, results):
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "gpu-results.md").write_text(page(results))


def page(results):
    machine, parts = results["machine"], results["parts"]
    text = REHEARSAL if results["rehearsal"] else ""
    text += "# GPU results\n\nWhat `scripts/gpu-check` wrote, unabridged.\n\n"
    text += f"- Device: {machine['device']}, driver {machine['driver']}; {machine['cores']} cores.\n"
    text += f"- Versions: Flow at commit {results['commit']}; PyTorch {machine['torch']} and its libtorch, CUDA "
    text += f"{machine['cuda']}, NCCL {machine['nccl']}, Python {machine['python']}.\n"
    for name, part in parts.items():
        text += f"- {name.capitalize()}: {part['date']}, `{part['command']}`.\n"
    not_run = []

    text += "\n## Checks\n\n"
    if "checks" in parts:
        items = parts["checks"]["items"]
        text += counts(items) + table(
            ["check", "outcome", "s"], [[item["name"], outcome(item), f"{item.get('seconds', 0):.1f}"] for item in items]
        )
    else:
        not_run.append("all checks: `run checks`")

    text += "## Benches\n\n"
    if "bench" in parts:
        items = parts["bench"]["items"]
        rows = [row for item in items for row in item.get("rows", [])]
        text += counts(items) + table(["", "Flow", "other", "ratio", "to reach", "reached"], rows)
        for item in items:
            for model, timeline in item.get("timelines", {}).items():
                text += f"### Reductions inside backward: {model}, 2 ranks\n\n"
                text += table(["", "size", "ready at", "done at", "backward's end", "hidden"], timeline)
    else:
        not_run.append("all benches: `run bench`")

    items = [item for part in parts.values() for item in part["items"]]
    not_run += [f"{item['name']}: {outcome(item)}" for item in items if item["outcome"] != "ok"]
    not_run.append("more GPUs than one, and several machines: `scripts/gpu-check` has nothing for them yet")
    return text + MEASURED + "\n## What did not run, or failed\n\n" + "".join(f"- {line}\n" for line in not_run)


def outcome(item):
    return item["outcome"] + (f": {item['detail']}" if item.get("detail") else "")


def counts(items):
    outcomes = [item["outcome"] for item in items]
    names = [name for name in ("ok", "FAILED", "could not run", "not run") if name in outcomes]
    return ", ".join(f"{outcomes.count(name)} {name}" for name in names) + ".\n\n"
