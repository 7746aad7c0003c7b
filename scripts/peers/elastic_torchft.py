"""The training of `elastic.py` with torchft's Manager, as its train_ddp.py has it: `JOURNAL=FILE elastic_torchft.py`.

Each rank is a replica group of its own, started by a torchrun of its own. A step is noted that was committed.
"""

import os
import time
from datetime import timedelta

import torch
from torch.nn.functional import cross_entropy
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


# The PyTorch of scripts/setup has been built with NCCL and has none, which torchft cannot know: it would reset NCCL's recorder.
if not torch.cuda.is_available():
    vars(torch._C._distributed_c10d).pop("_reset_fr_recording_nccl", None)


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    adam = torch.optim.Adam(model.parameters())

    def state_dict():
        return {"model": model.state_dict(), "optimizer": adam.state_dict()}

    def load_state_dict(state):
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"rank-{os.environ['REPLICA_GROUP_ID']}",
        timeout=timedelta(seconds=30),
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, adam)
    with open(os.environ["JOURNAL"], "a") as journal:
        while True:
            before = manager.current_step()
            optimizer.zero_grad()
            images = torch.randn(32, 64)
            cross_entropy(wrapped(images), images[:, :10].argmax(1)).backward()
            optimizer.step()
            step = manager.current_step()
            if step > before:
                print(time.time(), step, os.getpid(), manager.num_participants(), file=journal, flush=True)


main()
