"""The model of scripts/elastic in PyTorch, and batches of noise."""

import torch
from torch import nn


def lenet():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(32, 64, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, 10),
    )


def batch(step, rank):
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    return torch.rand(5, 1, 28, 28, generator=numbers), torch.randint(10, (5,), generator=numbers)
