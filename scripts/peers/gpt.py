"""PyTorch's side of `flow-bench gpt`: the same block of GPT-2 and training step, tensor parallel by DTensor over gloo.

usage: torchrun --nproc_per_node R gpt.py WIDTH TOKENS
"""

import json
import statistics
import sys
from time import perf_counter

import needs_torch  # noqa: F401: first

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from ranks import join, leave

HEADS = 8
BATCH = 4
SECONDS = 4.5
WARM_UP = 5
PLAN = {"qkv": ColwiseParallel(), "projection": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.head_width = heads, width // HEADS
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, qkv):
        batch, tokens, _ = qkv.shape
        q, k, v = qkv.view(batch, tokens, self.heads, 3, self.head_width).permute(3, 0, 2, 1, 4).unbind()
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, tokens, -1)

    def forward(self, x):
        x = x + self.projection(self.attention(self.qkv(self.norm1(x))))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


def main():
    width, tokens = map(int, sys.argv[1:])
    join("cpu")
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    block = parallelize_module(Block(width, HEADS // ranks), init_device_mesh("cpu", (ranks,)), PLAN)
    optimizer = torch.optim.Adam(block.parameters(), lr=1e-4)
    x, y = torch.randn(BATCH, tokens, width), torch.randn(BATCH, tokens, width)

    def step():
        optimizer.zero_grad()
        functional.mse_loss(block(x), y).backward()
        optimizer.step()

    def seconds():
        start = perf_counter()
        step()
        return perf_counter() - start

    warm_up = [seconds() for _ in range(WARM_UP)]
    steps = torch.tensor(max(5, int(SECONDS / statistics.median(warm_up))))
    dist.broadcast(steps, 0)
    times = [seconds() for _ in range(steps)]
    if dist.get_rank() == 0:
        line = {"bench": "gpt", "width": width, "tokens": tokens, "ranks": ranks}
        print(json.dumps({**line, "parallel_ms": statistics.median(times) * 1e3}), flush=True)
    leave()


main()
