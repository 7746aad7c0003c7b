"""A training in parts, in flow_torch.InProcessRestart, of which processes are killed at random moments, one of them as it comes. All ranks take
the same batch, and means are exact, so that neither weights nor losses depend on how many ranks there are. Prints "rank R: DIGEST", of weights,
the optimizer's state and losses, or what is wrong.

usage: restarted_in_process.py FOLDER none|kills
"""

import hashlib
import os
import pickle
import sys
import weakref

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import flow_torch
from elastic_common import gradient_at, kill_within
from flow_torch.checkpoint import InMemoryReader, InMemoryWriter, latest

FOLDER, KILLS = sys.argv[1], sys.argv[2] == "kills"
PROCESS = RANK, REPLACEMENT = int(os.environ["RANK"]), int(os.environ["FLOW_REPLACEMENT"])
ROUNDS, STEPS = 4, 6
# By rank and replacement: who is killed in each round, and who as it comes; and how many have been at the end of each round.
KILLED, KILLED_AS_THEY_COME, COUNTS = [(0, 0), (1, 0), (2, 0), (0, 1)], [(1, 1)], [1, 3, 4, 5]
armed = []
# Of attempts before: the meshes, and the models, by weak references.
meshes, models = [], []


class Network(torch.nn.Module):
    """Its gradients are those of `gradient_at`."""

    def __init__(self):
        super().__init__()
        self.large, self.small = torch.nn.Parameter(torch.zeros(50, 20)), torch.nn.Parameter(torch.zeros(2))

    def forward(self, factor):
        return (self.large * gradient_at(self.large) * factor).sum() + (self.small * gradient_at(self.small)).sum()


class Training:
    def __init__(self):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        by_name = DeviceMesh(device_type="cpu", mesh=list(range(dist.get_world_size())))
        if by_name != mesh or pickle.loads(pickle.dumps(by_name)) != mesh:
            sys.exit("a mesh is not taken for the same one")
        if any(mesh == before for before in meshes):
            sys.exit("a mesh is taken for one of before, where this process may have had another rank")
        if any(before() is not None for before in models):
            sys.exit("a model of before is still there")
        self.net = fully_shard(Network(), mesh=mesh)
        meshes.append(mesh)
        models.append(weakref.ref(self.net))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.progress = {"step": torch.tensor(0), "round": torch.tensor(0), "losses": torch.zeros(ROUNDS * STEPS)}

    def state(self):
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "progress": self.progress}

    def load(self):
        path = latest(FOLDER)
        if path:
            state = self.state()
            dcp.load(state, checkpoint_id=path, storage_reader=InMemoryReader(path))
            set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            self.progress = state["progress"]

    def step(self):
        step = self.progress["step"].item()
        loss = self.net(float(step % 3))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.progress["losses"][step] = loss.item()
        self.progress["step"] += 1

    def end_round(self):
        """When so many have been killed, and others have come for them."""
        restarts = torch.tensor([REPLACEMENT])
        dist.all_reduce(restarts)
        if restarts.item() > COUNTS[self.progress["round"]]:
            sys.exit("a process has ended that was not killed")
        is_complete = dist.get_world_size() == 3 and restarts.item() == COUNTS[self.progress["round"]]
        self.progress["round"] += not KILLS or is_complete

    def digest(self):
        hashed = hashlib.sha256(self.progress["losses"].numpy().tobytes())
        state = self.state()
        tensors = [*state["model"].values(), *(value for of in state["optimizer"]["state"].values() for value in of.values())]
        for tensor in tensors:
            hashed.update(getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)().numpy().tobytes())
        return hashed.hexdigest() if len(set(self.progress["losses"].tolist())) > ROUNDS * STEPS / 2 else f"losses {self.progress['losses']}"


def train(attempt):
    training = Training()
    training.load()
    group, writer, saved = dist.new_group(), InMemoryWriter(), None
    while training.progress["round"] < ROUNDS:
        attempt.check()
        current = training.progress["round"].item()
        if KILLS and not armed and PROCESS == KILLED[current]:
            armed.append(True)
            kill_within(0.3)
        if training.progress["step"] < (current + 1) * STEPS:
            training.step()
        else:
            training.end_round()
        if saved is not None:
            saved.result()
        path = f"{FOLDER}/step-{training.progress['step']}-{training.progress['round']}"
        saved = dcp.async_save(training.state(), checkpoint_id=path, storage_writer=writer, process_group=group)
        if current != training.progress["round"]:
            saved.result()
    if saved is not None:
        saved.result()
    return training.digest()


def fail(attempt):
    attempt.check()
    raise ValueError("the program's")


def main():
    torch.set_num_threads(1)
    if KILLS and PROCESS in KILLED_AS_THEY_COME:
        kill_within(0.5)
    if not KILLS:
        try:
            flow_torch.InProcessRestart().run(fail)
        except ValueError as error:
            assert str(error) == "the program's"
        else:
            sys.exit("an error of the program is lost")
    digest = flow_torch.InProcessRestart().run(train)
    # One write for a line.
    os.write(1, f"rank {RANK}: {digest}\n".encode())


if __name__ == "__main__":
    main()
