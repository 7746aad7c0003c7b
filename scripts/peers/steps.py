"""Training steps of the benches of backends."""

import torch
import torch.distributed as dist
from torch import nn


def made(make):
    """A model, the same on all ranks, and a batch, another on each."""
    torch.manual_seed(0)
    model, shape = make()
    torch.manual_seed(dist.get_rank())
    return model, torch.randn(shape), torch.randint(0, 10, shape[:1])


def stepper(model, x, y, optimizer=torch.optim.SGD):
    optimizer = optimizer(model.parameters(), lr=1e-6)  # all models stay alike: times depend on values
    loss_function = nn.CrossEntropyLoss()

    def step():
        optimizer.zero_grad()
        loss_function(model(x), y).backward()
        optimizer.step()

    return step
