"""Writes tests/data/sampler.json: what PyTorch's DistributedSampler gives, for ddp/tests/it/sampler.rs to compare with.

Run as python3 scripts/parity/sampler.py: it finds a Python with torch as scripts/torch_python.py says.
One case a line. A rank's indices are stored in full up to FULL of them; beyond, as their number, the first and last
three, and a checksum (FNV-1a over 64-bit words).
"""

import itertools
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import torch_python

torch_python.restart()

import torch
from torch.utils.data import DistributedSampler

LENGTHS = [0, 1, 3, 10, 16, 1000, 65537]
REPLICAS = [1, 2, 3, 5, 8]
# (seed, epoch); only the low 32 bits of the sum reach the generator.
SEEDS = [(0, 0), (0, 1), (1, 0), (42, 0), (42, 9)]
SEEDS += [(2**31 - 1, 1), (2**32 - 1, 1), (2**32 + 5, 0), (2**63 + 11, 2), (2**64 - 1, 0)]
FULL = 6


def checksum(indices):
    value = 0xCBF29CE484222325
    for index in indices:
        value = ((value ^ index) * 0x100000001B3) % 2**64
    return f"{value:016x}"


def stored(indices):
    if len(indices) <= FULL:
        return indices
    return {"len": len(indices), "first": indices[:3], "last": indices[-3:], "checksum": checksum(indices)}


def case(n, replicas, shuffle, seed, epoch, drop_last):
    ranks = []
    for rank in range(replicas):
        sampler = DistributedSampler(range(n), replicas, rank, shuffle, seed, drop_last)
        sampler.set_epoch(epoch)
        indices = list(sampler)
        assert len(indices) == len(sampler)
        ranks.append(stored(indices))
    settings = {"n": n, "replicas": replicas, "shuffle": shuffle, "seed": seed, "epoch": epoch, "drop_last": drop_last}
    return settings | {"ranks": ranks}


cases = []
for n, replicas, drop_last in itertools.product(LENGTHS, REPLICAS, [False, True]):
    cases.append(case(n, replicas, False, 0, 0, drop_last))
    if n > 1:
        cases += [case(n, replicas, True, seed, epoch, drop_last) for seed, epoch in SEEDS]
    else:
        cases.append(case(n, replicas, True, 42, 9, drop_last))

path = pathlib.Path(__file__).resolve().parents[2] / "tests/data/sampler.json"
lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
path.write_text(f'{{"torch":"{torch.__version__}","cases":[\n{lines}\n]}}\n')
print(f"{path}: {len(cases)} cases, {path.stat().st_size} bytes")
