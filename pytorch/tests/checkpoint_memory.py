"""Checkpoints in flow-launch's memory: the ranks are killed, started again, and go on from there. Two ranks. usage: checkpoint_memory.py FOLDER

The first attempt is killed while it writes to the memory, the second one while it writes to the disk. Each case prints a line that ends with "good".
"""

import os
import shutil
import signal
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from checkpoint_async import Training, same, wraps
from flow_torch import checkpoint
from flow_torch.checkpoint import InMemoryReader, InMemoryWriter, latest


class Killed(InMemoryWriter):
    """Is killed with its files in the memory, but for the coordinator's record."""

    def finish(self, **_):
        os.kill(os.getpid(), signal.SIGKILL)


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


def attempt_0(wrap, group, folder):
    assert latest(folder, group) is None
    writer = InMemoryWriter()
    for step in 1, 2, 3:
        save(wrap, step, folder, group, writer)
        assert latest(folder, group) == f"{folder}/step-{step}"
    # What is in the folder is a checkpoint of PyTorch's.
    assert is_state_of(wrap, 3, f"{folder}/step-3", None)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    good("saved in memory and in a folder")
    save(wrap, 4, folder, group, Killed())


def attempt_1(wrap, group, folder):
    assert latest(folder, group) == f"{folder}/step-3" and not os.path.exists(folder)
    assert is_state_of(wrap, 3, f"{folder}/step-3", InMemoryReader(folder))
    good("killed before all had it in memory")
    dist.barrier()
    checkpoint._write = killed
    save(wrap, 4, folder, group, InMemoryWriter())


def attempt_2(wrap, group, folder):
    assert latest(folder, group) == f"{folder}/step-4" and not os.path.exists(folder)
    assert latest(f"{folder}-other", group) is None
    for step in 3, 4:
        assert is_state_of(wrap, step, f"{folder}/step-{step}", InMemoryReader(folder))
    good("killed before it was in the folder")

    # The disk is full: all ranks get an error with the file, and the memory has it.
    writer = InMemoryWriter()
    if dist.get_rank() == 0:
        os.makedirs(f"{folder}/step-5")
        os.symlink("/dev/full", f"{folder}/step-5/__1_0.distcp.tmp")
    dist.barrier()
    try:
        save(wrap, 5, folder, group, writer)
    except dcp.CheckpointException as error:
        assert f"cannot write {folder}/step-5/__1_0.distcp: No space left on device" in str(error), error
    else:
        raise AssertionError("a full disk is no error")
    assert latest(folder, group) == f"{folder}/step-5"
    assert is_state_of(wrap, 5, f"{folder}/step-5", InMemoryReader(folder))
    save(wrap, 6, folder, group, writer)
    good("the disk is full")

    # A byte of rank 1's file is wrong: the one before serves.
    if dist.get_rank() == 1:
        with checkpoint._Memory(checkpoint._own()) as memory:
            (record,) = (record for record in memory.records().values() if record.checkpoint.endswith("step-6"))
            start, length, _ = record.files["__1_0.distcp"]
            at = start + length // 2
            os.pwrite(memory.file.fileno(), bytes([~memory.read(at, 1)[0] & 255]), at)
    dist.barrier()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert latest(folder, group) == f"{folder}/step-5"
    texts = [str(warning.message) for warning in warned]
    assert dist.get_rank() > 0 or any("step-6 is not whole in memory" in text for text in texts), texts
    try:
        is_state_of(wrap, 6, f"{folder}/step-6", InMemoryReader(folder))
    except dcp.CheckpointException as error:
        assert "__1_0.distcp is damaged in memory" in str(error), error
    else:
        raise AssertionError("a damaged file is no error")
    good("a damaged file")


def main():
    torch.set_num_threads(1)
    dist.init_process_group("flow")
    group = dist.new_group()
    attempt = (attempt_0, attempt_1, attempt_2)[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
    attempt(wraps()["fully_shard"], group, f"{sys.argv[1]}/checkpoints")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
