"""Trains with ignite's engine, and sums up over ranks."""

import ignite.distributed as idist
import torch
from ignite.engine import Engine

from result import end, tell


def main(local_rank):
    torch.manual_seed(0)
    model = idist.auto_model(torch.nn.Linear(4, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))

    def step(_engine, inputs):
        optimizer.zero_grad()
        model(inputs + idist.get_rank()).square().mean().backward()
        optimizer.step()

    Engine(step).run([torch.ones(2, 4)] * 3)
    weights = " ".join(f"{weight:.4f}" for weight in model.module.weight[0])
    total = idist.all_reduce(torch.tensor(idist.get_rank() + 1.0)).item()
    rank = f"rank {idist.get_rank()} of {idist.get_world_size()}, local rank {local_rank}"
    tell(f"{rank}: {weights} {total}")


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(main)
end()
