"""A training of torchft over gloo, whose replicas are started again when they end: JOURNAL REPLICAS [ADDRESS NUMBER]."""

import os
import subprocess
import sys
import time
from datetime import timedelta

import torch
from elastic_model import batch, lenet


def train(journal, lighthouse, number):
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    model = lenet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{number}",
        lighthouse_addr=lighthouse,
        store_addr="localhost",
        store_port=29600 + int(number),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=5),
    )
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, optimizer)
    while True:
        images, labels = batch(manager.current_step(), int(number))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(ddp(images), labels).backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            with open(journal, "a") as file:
                file.write(f"{time.time():.4f} {before} {os.getpid()} {manager.num_participants()}\n")


def start(journal, replicas, lighthouse, number):
    return subprocess.Popen([sys.executable, __file__, journal, str(replicas), lighthouse, str(number)])


def main():
    journal, replicas, *rest = sys.argv[1:]
    if rest:
        return train(journal, *rest)
    from torchft import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    jobs = [start(journal, replicas, lighthouse.address(), number) for number in range(int(replicas))]
    while True:
        for number, job in enumerate(jobs):
            if job.poll() is not None:
                jobs[number] = start(journal, replicas, lighthouse.address(), number)
        time.sleep(0.05)


main()
