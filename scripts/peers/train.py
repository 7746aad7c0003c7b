"""PyTorch's side of the example `train`: OneFlow's documented data-parallel run, 500 steps.

usage: torchrun --nproc_per_node 2 train.py
"""

import os
import sys

import needs_torch  # noqa: F401: first

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

DATA = [([[1, 2], [2, 3]], [[8], [13]]), ([[4, 6], [3, 1]], [[26], [9]])]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2, 1))

    def forward(self, x):
        return x @ self.w


def main():
    dist.init_process_group("gloo")
    x, y = (torch.tensor(rows, dtype=torch.float32) for rows in DATA[dist.get_rank()])
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, 501):
        optimizer.zero_grad()
        loss = (model(x) - y).square().sum()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"{step}/500 loss:{loss.item()}")
    print(f"w: {model.module.w.tolist()}")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # skips Python's finalization, in which gloo's threads now and then abort


main()
