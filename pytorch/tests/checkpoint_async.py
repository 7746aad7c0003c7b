"""DistributedCheckpoint's async_save over flow, while the training goes on. Two ranks. usage: checkpoint_async.py FOLDER threads|processes|killed

Each case prints a line that ends with "good". Threads write, or processes of PyTorch's. With `killed`, the ranks are killed while they write, and
find what is whole once they are started again.
"""

import copy
import os
import signal
import sys
import threading

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flow_torch


class Writer(dcp.FileSystemWriter):
    """Writes no tensor before the training has gone on."""

    def __init__(self, path):
        super().__init__(path)
        self.begun, self.may_write = threading.Event(), threading.Event()

    def write_data(self, *arguments):
        self.begun.set()
        assert self.may_write.wait(200), "the training has not gone on"
        return super().write_data(*arguments)


class Training:
    def __init__(self, wrap, seed):
        torch.manual_seed(seed)
        self.net = wrap(nn.Sequential(nn.Linear(40, 61), nn.ReLU(), nn.Linear(61, 3)))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.step()

    def step(self):
        self.optimizer.zero_grad()
        self.net(torch.full((4, 40), dist.get_rank() + 1.0)).square().mean().backward()
        self.optimizer.step()

    def state(self):
        return dict(zip(("model", "optimizer"), get_state_dict(self.net, self.optimizer)))

    def load(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def same(one, other):
    """Whether states have the same bits on this rank."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        one, other = (getattr(tensor, "_local_tensor", tensor) for tensor in (one, other))
        return torch.equal(one, other)
    return one == other


def wraps():
    mesh = init_device_mesh("cpu", (2,))

    def sharded(net):
        fully_shard(net, mesh=mesh)
        return net

    return {"fully_shard": sharded, "DDP": nn.parallel.DistributedDataParallel}


def saved_while_training(wrap, group, folder):
    """What is saved is what was there at the call, and a load gives the same bits."""
    training = Training(wrap, 1)
    at_the_call = copy.deepcopy(training.state())
    writer = Writer(folder)
    future = dcp.async_save(training.state(), storage_writer=writer, process_group=group)
    # Its operations and those of the training are under way at the same time.
    training.step()
    assert writer.begun.wait(200), "nothing is written"
    training.step()
    assert not future.done() and not same(at_the_call, training.state())
    writer.may_write.set()
    future.result()
    other = Training(wrap, 2)
    assert not same(at_the_call, other.state())
    other.load(folder)
    assert same(at_the_call, other.state())


def failed_write(wrap, group, folder):
    """Rank 1's disk is full: its name is in the error of all. The next checkpoint is saved."""
    training = Training(wrap, 1)
    os.makedirs(folder, exist_ok=True)
    if dist.get_rank() == 1:
        os.symlink("/dev/full", f"{folder}/__1_0.distcp")
    future = dcp.async_save(training.state(), checkpoint_id=folder, process_group=group)
    training.step()
    try:
        future.result()
    except dcp.CheckpointException as error:
        assert list(error.failures) == [1] and "No space left on device" in str(error), error
    else:
        raise AssertionError("a full disk is no error")
    assert not os.path.exists(f"{folder}/.metadata")
    saved_while_training(wrap, group, f"{folder}-next")


def saved_by_processes(wrap, group, folder):
    training = Training(wrap, 1)
    for step in "1", "2":
        at_the_call = copy.deepcopy(training.state())
        by = AsyncCheckpointerType.PROCESS
        future = dcp.async_save(training.state(), checkpoint_id=folder + step, async_checkpointer_type=by)
        # Only the processes are in the save: the training may use any group.
        training.step()
        future.result()
        other = Training(wrap, 2)
        other.load(folder + step)
        assert same(at_the_call, other.state())


class KilledWriter(dcp.FileSystemWriter):
    """Is killed with a part of its file written."""

    def write_data(self, *arguments):
        super().write_data(*arguments)
        (file,) = (f"{self.path}/{name}" for name in os.listdir(self.path) if name.startswith(f"__{dist.get_rank()}_"))
        os.truncate(file, os.path.getsize(file) // 2)
        os.kill(os.getpid(), signal.SIGKILL)


def killed_while_it_writes(wrap, group, folder):
    """The checkpoint before is whole, and the other is not one."""
    training = Training(wrap, 1)
    # An attempt before has gone no further than this one.
    if not os.path.exists(f"{folder}-2"):
        dcp.async_save(training.state(), checkpoint_id=f"{folder}-1", process_group=group).result()
        training.step()
        dcp.async_save(training.state(), storage_writer=KilledWriter(f"{folder}-2"), process_group=group).result()
    assert not os.path.exists(f"{folder}-2/.metadata")
    other = Training(wrap, 2)
    other.load(f"{folder}-1")
    assert same(training.state(), other.state())


CASES = {
    "threads": [saved_while_training, failed_write],
    "processes": [saved_by_processes],
    "killed": [killed_while_it_writes],
}


def main():
    torch.set_num_threads(1)
    dist.init_process_group("flow")
    group = dist.new_group()
    folder, cases = sys.argv[1:]
    for name, wrap in wraps().items():
        for case in CASES[cases]:
            case(wrap, group, f"{folder}/{name}-{case.__name__}")
            # One write for a line.
            os.write(1, f"{name}, {case.__name__}: good\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
