"""A small training for `scripts/elastic-peers`, which kills its ranks: `JOURNAL=FILE elastic.py restart|in-place`.

With `restart` it is PyTorch's DistributedDataParallel over gloo: all workers begin anew from the file CHECKPOINT, which is of each step.
With `in-place` it goes on with flow_torch.Elastic. After each step a rank appends the time, the step, its process, and the number of
ranks to the journal.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy


def note(journal, step):
    print(time.time(), step, os.getpid(), dist.get_world_size(), file=journal, flush=True)


def loss_of(model):
    images = torch.randn(32, 64)
    return cross_entropy(model(images), images[:, :10].argmax(1))


def in_place(model, optimizer, journal):
    import flow_torch

    state = {"step": 0}
    with flow_torch.Elastic(model, optimizer, state) as elastic:
        while True:
            with elastic.step() as step:
                loss_of(elastic.model).backward()
                optimizer.step()
                state["step"] += 1
            if step.is_done:
                note(journal, state["step"])


def from_checkpoint(model, optimizer, journal, path):
    dist.init_process_group("gloo")
    step = 0
    if os.path.exists(path):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    while True:
        optimizer.zero_grad()
        loss_of(wrapped).backward()
        optimizer.step()
        step += 1
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path + ".new")
            os.rename(path + ".new", path)
        note(journal, step)


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters())
    with open(os.environ["JOURNAL"], "a") as journal:
        if sys.argv[1:] == ["in-place"]:
            in_place(model, optimizer, journal)
        else:
            from_checkpoint(model, optimizer, journal, os.environ["CHECKPOINT"])


main()
