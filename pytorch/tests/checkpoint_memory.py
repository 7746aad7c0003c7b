"""Checkpoints in flow-launch's memory: the ranks are killed, started again, and go on from there. Two ranks. usage: checkpoint_memory.py FOLDER

The first attempt is killed while it writes to the memory, the second one while it writes to the disk. Each case prints a line that ends with "good".
"""

import os
import pickle
import shutil
import signal
import sys
import threading
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor

from checkpoint_async import Training, same, wraps
from flow_torch import checkpoint
from flow_torch.checkpoint import InMemoryReader, InMemoryWriter, latest
from flow_torch.checkpoint_memory import Memory


class Killed(InMemoryWriter):
    """Is killed with its files in the memory, but for the coordinator's record."""

    def finish(self, **_):
        os.kill(os.getpid(), signal.SIGKILL)


class Forks(InMemoryWriter):
    """Forks a process that outlives the save."""

    def _write_data(self, *arguments):
        self.child = os.fork()
        if not self.child:
            time.sleep(100)
            os._exit(0)
        return super()._write_data(*arguments)


class Waits(InMemoryWriter):
    """Writes nothing before it may."""

    def __init__(self):
        super().__init__()
        self.may_write = threading.Event()

    def write_data(self, *arguments):
        assert self.may_write.wait(200), "nothing else was staged"
        return super().write_data(*arguments)


class FailsOnRank1(InMemoryWriter):
    def _write_data(self, *arguments):
        if dist.get_rank() == 1:
            raise RuntimeError("rank 1 cannot write")
        return super()._write_data(*arguments)


def killed(record):
    os.kill(os.getpid(), signal.SIGKILL)


def good(what):
    # One write for a line.
    os.write(1, f"{what}: good\n".encode())


def is_state_of(wrap, step, path, reader):
    """Whether a checkpoint has what there was after so many steps."""
    expected, loaded = trained(wrap, step), Training(wrap, 2)
    state = loaded.state()
    dcp.load(state, checkpoint_id=path, storage_reader=reader)
    return same(state, expected.state()) and not same(Training(wrap, 2).state(), expected.state())


def trained(wrap, steps):
    training = Training(wrap, 1)
    for _ in range(steps):
        training.step()
    return training


def save(wrap, step, folder, group, writer):
    training = trained(wrap, step)
    future = dcp.async_save(training.state(), checkpoint_id=f"{folder}/step-{step}", storage_writer=writer, process_group=group)
    training.step()
    future.result()


def is_error(text, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except (RuntimeError, dcp.CheckpointException) as error:
        assert text in str(error), error
        return error
    raise AssertionError(f"no error with {text}")


def remove(folder):
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()


def damage(record, name):
    with Memory(record.memories[name]) as memory:
        start, length, _ = checkpoint._part(memory, record, name)
        at = start + length // 2
        os.pwrite(memory.file.fileno(), bytes([~memory.read(at, 1)[0] & 255]), at)


def attempt_0(wrap, group, folder):
    assert latest(folder, group) is None
    writer = InMemoryWriter()
    for step in 1, 2, 3:
        save(wrap, step, folder, group, writer)
        assert latest(folder, group) == f"{folder}/step-{step}"
    # What is in the folder is a checkpoint of PyTorch's.
    assert is_state_of(wrap, 3, f"{folder}/step-3", None)
    remove(folder)
    good("saved in memory and in a folder")
    save(wrap, 4, folder, group, Killed())


def attempt_1(wrap, group, folder):
    assert not os.path.exists(folder)
    dist.barrier()
    assert latest(folder, group) == f"{folder}/step-3"
    assert is_state_of(wrap, 3, f"{folder}/step-3", None)
    good("what was only in memory is in the folder")
    remove(folder)
    assert is_state_of(wrap, 3, f"{folder}/step-3", InMemoryReader(folder))
    good("killed before all had it in memory")
    dist.barrier()
    checkpoint._write = killed
    save(wrap, 4, folder, group, InMemoryWriter())


def attempt_2(wrap, group, folder):
    assert not os.path.exists(folder)
    dist.barrier()
    assert latest(folder, group) == f"{folder}/step-4"
    assert latest(f"{folder}-other", group) is None
    remove(folder)
    for step in 3, 4:
        assert is_state_of(wrap, step, f"{folder}/step-{step}", InMemoryReader(folder))
    good("killed before it was in the folder")
    full_disk(wrap, group, folder)
    damaged(wrap, group, folder)
    others(wrap, group, folder)
    forked(wrap, group, folder)
    staged(wrap, group, folder)


def full_disk(wrap, group, folder):
    """All ranks get an error with the file, and the memory has it."""
    writer = InMemoryWriter()
    new = f"{folder}/step-5/__1_0.distcp.tmp"
    if dist.get_rank() == 0:
        os.makedirs(f"{folder}/step-5")
        os.symlink("/dev/full", new)
    dist.barrier()
    text = f"cannot write {folder}/step-5/__1_0.distcp: No space left on device"
    is_error(text, save, wrap, 5, folder, group, writer)
    assert not os.path.lexists(new), "what was begun is left"
    assert latest(folder, group) == f"{folder}/step-5"
    assert is_state_of(wrap, 5, f"{folder}/step-5", None), "what is in memory comes to the folder later"
    remove(f"{folder}/step-5")
    assert is_state_of(wrap, 5, f"{folder}/step-5", InMemoryReader(folder))
    good("the disk is full")


def damaged(wrap, group, folder):
    """A byte of rank 1's file is wrong: the one before serves, and stays until the next one is whole."""
    writer, write = InMemoryWriter(), checkpoint._write
    assert latest(folder, group) == f"{folder}/step-5"

    def damages(record):
        damage(record, "__1_0.distcp")
        write(record)

    checkpoint._write = damages
    text = f"{folder}/step-6/__1_0.distcp is damaged in memory"
    is_error(text, save, wrap, 6, folder, group, writer)
    checkpoint._write = write
    assert not os.path.exists(f"{folder}/step-6/.metadata"), "a damaged checkpoint is on the disk"
    is_error(text, is_state_of, wrap, 6, f"{folder}/step-6", InMemoryReader(folder))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert latest(folder, group) == f"{folder}/step-5"
    texts = [str(warning.message) for warning in warned]
    assert dist.get_rank() > 0 or any("step-6 is not whole in memory" in text for text in texts), texts
    remove(folder)
    # The next save works although the program has the error, and with it what the save had.
    failure = is_error("rank 1 cannot write", save, wrap, 7, folder, group, FailsOnRank1())
    assert latest(folder, group) == f"{folder}/step-5"
    remove(folder)
    assert is_state_of(wrap, 5, f"{folder}/step-5", InMemoryReader(folder))
    good("a damaged file")

    # The memory of the newest is damaged, and its folder is whole.
    save(wrap, 8, folder, group, writer)
    del failure
    dist.barrier()
    if dist.get_rank() == 1:
        damage(checkpoint._checkpoints()[0], "__1_0.distcp")
    dist.barrier()
    assert latest(folder, group) == f"{folder}/step-8"
    assert is_state_of(wrap, 8, f"{folder}/step-8", InMemoryReader(folder))
    good("a damaged file, and a folder")


def others(wrap, group, folder):
    """What is no save of all ranks to the one folder, and an error of one rank."""
    save(wrap, 9, folder, group, InMemoryWriter())
    writer, state = InMemoryWriter(), trained(wrap, 1).state()
    to = {"checkpoint_id": f"{folder}/step-10", "storage_writer": writer}
    is_error("1 of 2 ranks save, and only all", dcp.save, state, no_dist=True, **to)
    is_error("use_collectives=False makes no", dcp.save, state, process_group=group, use_collectives=False, **to)
    is_error(f"the memory has {folder}/step-", save, wrap, 10, f"{folder}-other", group, writer)
    planners = [DefaultSavePlanner(enable_plan_caching=True) for _ in range(2)]
    dcp.save(state, process_group=group, planner=planners[0], **to)
    is_error("enable_plan_caching=True makes no", dcp.save, state, process_group=group, planner=planners[1], **to)
    assert latest(folder, group) == f"{folder}/step-10"

    is_whole = checkpoint._is_whole
    if dist.get_rank() == 1:
        checkpoint._is_whole = lambda record, name: 1 // 0
    is_error(f"latest checkpoint of {folder}: rank 1: integer division", latest, folder, group)
    checkpoint._is_whole = is_whole
    good("what is an error")


def forked(wrap, group, folder):
    """A process that was forked in a save has the lock no longer than that."""
    writer = Forks()
    save(wrap, 11, folder, group, writer)
    try:
        save(wrap, 12, folder, group, InMemoryWriter())
    finally:
        os.kill(writer.child, signal.SIGKILL)
        os.waitpid(writer.child, 0)
    assert is_state_of(wrap, 12, f"{folder}/step-12", InMemoryReader(folder))
    good("a process that was forked in a save")


def staged(wrap, group, folder):
    """A copy is in the memory of the one before where that is as large, and no save has it."""
    writer = Waits()
    training = trained(wrap, 13)
    future = dcp.async_save(training.state(), checkpoint_id=f"{folder}/step-13", storage_writer=writer, process_group=group)
    training.step()
    second = writer.stage(training.state())
    writer.may_write.set()
    future.result()
    assert is_state_of(wrap, 13, f"{folder}/step-13", InMemoryReader(folder))
    assert same(second, training.state())

    place = memory(second["model"])
    del second
    training.step()
    third = writer.stage(training.state())
    assert memory(third["model"]) == place and same(third, training.state())
    states = [
        {"a": torch.arange(4), "b": [torch.zeros(2), 1], "c": 3},
        {"a": torch.ones(1), "b": [torch.ones(2), 2]},
        {"a": torch.arange(4.0), "b": (torch.ones(2),), "c": torch.nn.Parameter(torch.tensor(5.0))},
        {"a": training.state()["model"], "b": "text", "c": torch.tensor(6.0)},
        {"a": distribute_tensor(torch.tensor(7.0), DeviceMesh("cpu", range(dist.get_world_size())), [Replicate()])},
    ]
    for state in states * 2:
        third = None
        third = writer.stage(state)
        assert same(third, state), third
        assert memory(third).isdisjoint(memory(state))
    third = None
    with torch.inference_mode():
        third = writer.stage(states[0])
    third = None
    assert same(writer.stage(states[0]), states[0])
    plain = InMemoryWriter()
    plain.stage(states[0])
    assert same(pickle.loads(pickle.dumps(plain)).stage(states[0]), states[0]), "as for a process that saves"
    good("what is staged in the memory of the copy before")


def memory(state):
    """The addresses of the tensors."""
    if isinstance(state, torch.Tensor):
        return {getattr(state, "_local_tensor", state).data_ptr()}
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return set().union(*map(memory, parts))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("flow")
    group = dist.new_group()
    attempt = (attempt_0, attempt_1, attempt_2)[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
    attempt(wraps()["fully_shard"], group, f"{sys.argv[1]}/checkpoints")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
