"""A training in flow_torch.Elastic, of which processes are killed at random moments, some of them as they come. All ranks take the same batch,
so that neither weights nor losses depend on how many there are; and they share other samples, of which none may be lost or taken twice.
Prints "rank R: DIGEST", of weights and losses, or what is wrong.

usage: elastic_steps.py flow|torch none|kills
"""

import hashlib
import os
import sys

import torch
import torch.distributed as dist

import flow_torch
from elastic_common import gradient_at, kill_within

KINDS = {"flow": flow_torch.DistributedDataParallel, "torch": torch.nn.parallel.DistributedDataParallel}
KIND, KILLS = KINDS[sys.argv[1]], sys.argv[2] == "kills"
PROCESS = RANK, REPLACEMENT = int(os.environ["RANK"]), int(os.environ["FLOW_REPLACEMENT"])
ROUNDS, STEPS = 4, 12
# By rank and replacement: who is killed in each round, and who as it comes; and how many have been at the end of each round.
KILLED, KILLED_AS_THEY_COME, COUNTS = [(0, 0), (1, 0), (2, 0), (0, 1)], [(1, 1), (2, 1)], [1, 3, 5, 6]


class Network(torch.nn.Module):
    """Its gradients are those of `gradient_at`."""

    def __init__(self):
        super().__init__()
        self.large, self.small = torch.nn.Parameter(torch.zeros(200, 200)), torch.nn.Parameter(torch.zeros(20))
        self.statistics = torch.nn.BatchNorm1d(20, affine=False)

    def forward(self, images):
        self.statistics(images)
        kept = torch.rand(200) < 0.9
        return (self.large * gradient_at(self.large) * kept).sum() + (self.small * gradient_at(self.small)).sum()


class Training:
    def __init__(self):
        self.net = Network()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.state = {
            "step": 0,
            "round": 0,
            "losses": [],
            "scheduler": torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.5),
            "scaler": torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=7),
            "samples": 0,
            "seen": torch.zeros(3 * ROUNDS * STEPS, dtype=torch.int64),
        }
        self.elastic = flow_torch.Elastic(self.net, self.optimizer, self.state, wrap=KIND)
        # The last step's number and what it has drawn, if it has failed.
        self.drawn = None

    def run(self):
        is_armed = False
        with self.elastic:
            while self.state["round"] < ROUNDS:
                if KILLS and not is_armed and PROCESS == KILLED[self.state["round"]]:
                    is_armed = True
                    kill_within(0.1)
                if self.state["step"] < (self.state["round"] + 1) * STEPS:
                    self.step()
                else:
                    self.end_round()

    def step(self):
        state, scaler = self.state, self.state["scaler"]
        with self.elastic.step():
            drawn = state["step"], torch.rand(1).item()
            if self.drawn != drawn and self.drawn is not None and self.drawn[0] == state["step"]:
                sys.exit("the random numbers are not those of the step that failed")
            self.drawn = drawn
            torch.manual_seed(state["step"])  # a newcomer draws the same
            state["losses"].append(0)  # a step that fails takes it back
            loss = self.elastic.model(torch.randn(8, 20))
            scaler.scale(loss).backward()
            scaler.unscale_(self.optimizer)
            self.take_samples()
            scaler.step(self.optimizer)
            scaler.update()
            state["scheduler"].step()
            state["losses"][-1] = loss.item()
            state["step"] += 1
            self.drawn = None

    def take_samples(self):
        """One of each rank."""
        taken = torch.zeros_like(self.state["seen"])
        taken[self.state["samples"] + dist.get_rank()] = 1
        dist.all_reduce(taken)
        self.state["seen"] += taken
        self.state["samples"] += dist.get_world_size()

    def end_round(self):
        """When so many have been killed, and others have come for them."""
        with self.elastic.step():
            restarts = torch.tensor([REPLACEMENT])
            dist.all_reduce(restarts)
            is_complete = dist.get_world_size() == 3 and restarts.item() == COUNTS[self.state["round"]]
            self.state["round"] += not KILLS or is_complete

    def digest(self):
        """Of weights and losses, if all else is right."""
        state = self.state
        if not bool((state["seen"] == (torch.arange(len(state["seen"])) < state["samples"])).all()):
            return f"samples were taken so often: {state['seen'].tolist()}"
        if len(state["losses"]) != ROUNDS * STEPS or len(set(state["losses"])) != ROUNDS * STEPS:
            return f"losses {state['losses']}"
        hashed = hashlib.sha256(repr((state["losses"], self.optimizer.param_groups[0]["lr"], state["scaler"].get_scale())).encode())
        for tensor in self.net.state_dict().values():
            hashed.update(tensor.numpy().tobytes())
        return hashed.hexdigest()


def main():
    torch.set_num_threads(1)
    if KILLS and PROCESS in KILLED_AS_THEY_COME:
        kill_within(0.3)
    training = Training()
    training.run()
    print(f"rank {dist.get_rank()}: {training.digest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
