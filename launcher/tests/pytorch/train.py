"""Trains with DDP and prints the weights, which do not depend on the number of ranks."""

import argparse

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from model import Net

SAMPLES, BATCH = 48, 12


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs = torch.arange(SAMPLES * 4.0).sin().view(SAMPLES, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, BATCH // world_size, sampler=sampler, num_workers=options.workers)

    torch.manual_seed(rank)  # All ranks get rank 0's weights.
    model = DistributedDataParallel(Net())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    print("weights", *(f"{weight:.6f}" for weight in nn.utils.parameters_to_vector(model.parameters())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
