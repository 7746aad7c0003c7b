"""Writes tests/data/draws.json: what PyTorch's WeightedRandomSampler and transformers' DistributedLengthGroupedSampler give, for
ddp/tests/it/draws.rs to compare with.

Run as python3 scripts/parity/draws.py: it finds a Python with torch as scripts/torch_python.py says, and transformers in
.python-libraries. One case a line. Weights and lengths are made of a formula that the test has too.
"""

import itertools
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import torch_python

torch_python.restart()
torch_python.set_up("--python-libraries", ROOT / ".python-libraries" / "transformers")
sys.path.insert(0, str(ROOT / ".python-libraries"))

import torch
import transformers
from torch.utils.data import WeightedRandomSampler
from transformers.trainer_pt_utils import DistributedLengthGroupedSampler

SEEDS = [0, 1, 42, 2**32 - 1]


def numbers(n):
    """Numbers below 1000, some of them equal."""
    return [i * 7919 % 1009 % 1000 for i in range(n)]


weighted = []
for n, num_samples, seed in itertools.product([1, 2, 10, 1000], [2, 7, 50], SEEDS):
    weights = [number / 8 + 0.125 for number in numbers(n)]
    generator = torch.Generator().manual_seed(seed)
    draws = list(WeightedRandomSampler(weights, num_samples, generator=generator))
    weighted.append({"n": n, "seed": seed, "replacement": True, "draws": draws})

# Without replacement as torch.multinomial does it where there is no MKL: its exponential_ takes MKL's random numbers.
for n, num_samples, seed in itertools.product([1, 2, 10, 1000], [1, 2, 7, 50], SEEDS):
    weights = torch.tensor([number / 8 + 0.125 for number in numbers(n)], dtype=torch.double)
    uniform = torch.empty_like(weights).uniform_(generator=torch.Generator().manual_seed(seed))
    draws = (weights / -torch.log1p(-uniform)).topk(min(n, num_samples)).indices.tolist()
    weighted.append({"n": n, "seed": seed, "replacement": False, "draws": draws})

grouped = []
for n, batch_size, replicas, drop_last in itertools.product([2, 10, 101, 450], [1, 3], [1, 3], [False, True]):
    for rank, seed in itertools.product(range(replicas), SEEDS[:2]):
        sampler = DistributedLengthGroupedSampler(
            batch_size, num_replicas=replicas, rank=rank, seed=seed, drop_last=drop_last, lengths=numbers(n)
        )
        sampler.set_epoch(1)
        settings = {"n": n, "batch_size": batch_size, "replicas": replicas, "rank": rank, "seed": seed, "drop_last": drop_last}
        grouped.append(settings | {"indices": list(sampler)})


def lines(cases):
    return ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)


path = ROOT / "tests/data/draws.json"
versions = f'"torch":"{torch.__version__}","transformers":"{transformers.__version__}"'
path.write_text(f'{{{versions},"weighted":[\n{lines(weighted)}\n],"grouped":[\n{lines(grouped)}\n]}}\n')
print(f"{path}: {len(weighted)} and {len(grouped)} cases, {path.stat().st_size} bytes")
