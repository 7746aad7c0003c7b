"""A training in flow_torch.Elastic, until a file is there: machines are lost meanwhile. The first rank notes each step, and the number of ranks that
have done it. Means are exact, and no step depends on the ranks: the weights are those of as many steps of one process. Prints "rank R: good".

usage: elastic_machines.py JOURNAL END
"""

import os
import sys

import torch
import torch.distributed as dist

import flow_torch
from elastic_common import gradient_at

JOURNAL, END = sys.argv[1:]


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(100))

    def forward(self, factor):
        return (self.weight * gradient_at(self.weight) * factor).sum()


class Training:
    def __init__(self):
        self.net = Network()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)

    def step(self, step, model):
        self.optimizer.zero_grad()
        model(float(step % 3)).backward()
        self.optimizer.step()


def main():
    torch.set_num_threads(1)
    training = Training()
    state = {"step": 0, "is_over": False}
    with flow_torch.Elastic(training.net, training.optimizer, state) as elastic:
        while not state["is_over"]:
            with elastic.step() as step:
                is_over = torch.tensor([int(os.path.exists(END))])
                dist.all_reduce(is_over, dist.ReduceOp.MAX)
                training.step(state["step"], elastic.model)
                state["step"] += 1
                state["is_over"] = is_over.item() > 0
            if step.is_done and dist.get_rank() == 0:
                with open(JOURNAL, "a") as journal:
                    journal.write(f"{state['step']} {dist.get_world_size()}\n")
    alone = Training()
    for step in range(state["step"]):
        alone.step(step, alone.net)
    is_good = torch.equal(alone.net.weight, training.net.weight) and bool(training.net.weight.any())
    # One write for a line.
    os.write(1, f"rank {os.environ['RANK']}: {'good' if is_good else 'other weights'}\n".encode())


if __name__ == "__main__":
    main()
