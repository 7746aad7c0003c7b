"""Checkpoints of torch.distributed.checkpoint in memory that flow-launch owns, and that outlives the ranks: see docs/torch.md.

The coordinator's record is the last one. So a checkpoint is whole or not there, whenever ranks are killed.
"""

import dataclasses
import io
import os
import threading
import uuid
import warnings
import weakref
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from .checkpoint_memory import STARTS, Memory, Record, Span, is_memory, own_path, sha256
from .checkpoint_staging import Staged, restage

__all__ = ["InMemoryReader", "InMemoryWriter", "latest"]

_METADATA = ".metadata"
# Bytes that go to the disk at once.
_BLOCK = 8 << 20
# The saves whose files `latest` has found to be whole, and those whose files are not.
_whole = set()
_damaged = set()


@dataclasses.dataclass(frozen=True)
class _Place:
    """What the coordinator tells a rank of a save."""

    prefix: str
    number: int
    save: str
    kept: str  # the save that stays until this one is whole


class _Saving(threading.local):
    """The save of this thread. The coordinator has the memory, locked, until the end."""

    folder = memory = memories = slot = record = end = None


_saving = _Saving()


class _Written(FileSystem):
    """Files that are written to a memory, one behind the other, from `end` on."""

    def __init__(self, memory, end):
        self.memory = memory
        self.end = end
        self.files = {}

    @contextmanager
    def create_stream(self, path, mode):
        span = Span(self.memory.file, self.end)
        yield span
        self.files[path.name] = [self.end, span.length, self.memory.sum(self.end, span.length)]
        self.end += span.length

    def exists(self, path):
        return path.name in self.files

    def rename(self, path, new_path):
        self.files[new_path.name] = self.files.pop(path.name)


class _Found(FileSystem):
    """The files of a checkpoint that is in memories."""

    def __init__(self, record):
        self.record = record

    @contextmanager
    def create_stream(self, path, mode):
        with Memory(self.record.memories[path.name]) as memory:
            start, length, digest = _part(memory, self.record, path.name)
            if self.record.save not in _whole and memory.sum(start, length) != digest:
                raise _damage(path)
            yield io.BufferedReader(Span(memory.file, start, length))


def _launcher():
    """The flow-launch that owns this rank's memory: no other one, on any machine, has the same."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid"), os.path.dirname(own_path())


def _parts(memory, whole, name):
    """Where a memory has the file of a checkpoint; nothing if it has it no more."""
    records = [record for record in memory.records().values() if record.save == whole.save]
    return [record.files[name] for record in records if name in record.files]


def _part(memory, whole, name):
    for part in _parts(memory, whole, name):
        return part
    raise RuntimeError(f"{whole.checkpoint}/{name} is no longer in memory; load it from its folder, or another checkpoint")


def _damage(file):
    return RuntimeError(f"{file} is damaged in memory; load it from its folder, or another checkpoint")


def _checkpoints():
    """The coordinators' records of the checkpoints whose files are all in memories of this machine, the newest first."""
    folder = os.path.dirname(own_path())
    found = []
    for name in os.listdir(folder):
        if is_memory(os.path.join(folder, name)):
            with Memory(os.path.join(folder, name)) as memory:
                found += [record for record in memory.records().values() if _METADATA in record.files]
    found = [record for record in found if all(_has(record, name) for name in record.memories)]
    return sorted(found, key=lambda record: (record.number, record.save), reverse=True)


def _has(record, name):
    """Whether a file of a checkpoint is there."""
    if not is_memory(record.memories[name]):
        return False
    with Memory(record.memories[name]) as memory:
        return bool(_parts(memory, record, name))


def _is_whole(record, name):
    """Whether a file of a checkpoint is there and has its sum."""
    if not _has(record, name):
        return False
    with Memory(record.memories[name]) as memory:
        start, length, digest = _part(memory, record, name)
        return memory.sum(start, length) == digest


def _is_in_folder(record):
    return (Path(record.checkpoint) / _METADATA).exists()


def latest(folder, process_group=None):
    """Returns the path of the newest checkpoint in `folder`, the same on all ranks; None if there is none. Memory comes before the disk.

    In memory it is the newest one whose files have their sums. It is written to its folder, if that has no `.metadata`. One that is damaged in
    memory counts too, if its folder has `.metadata`. On the disk it is the one whose `.metadata` was written last. All ranks of the group call
    this. An error of one is an error of all."""
    group = process_group if dist.is_initialized() else None
    rank = dist.get_rank(process_group) if dist.is_initialized() else 0
    size = dist.get_world_size(process_group) if dist.is_initialized() else 1
    parent = Path(folder).absolute()

    def of_all(find, *arguments):
        """What all ranks find."""
        try:
            own = find(*arguments), None
        except Exception as error:
            own = None, f"rank {rank}: {error}"
        all_own = [own]
        if size > 1:
            all_own = [None] * size
            dist.all_gather_object(all_own, own, group)
        for _, error in all_own:
            if error:
                raise RuntimeError(f"cannot find the latest checkpoint of {folder}: {error}")
        return [found for found, _ in all_own]

    def of_rank_0(find, *arguments):
        return of_all(lambda: find(*arguments) if rank == 0 else None)[0]

    def in_memory():
        return [record for record in _checkpoints() if Path(record.checkpoint).parent == parent]

    def has_whole(record):
        """Each rank checks some of the files."""
        return all(_is_whole(record, name) for name in sorted(record.memories)[rank::size])

    def on_disk():
        found = sorted(parent.glob(f"*/{_METADATA}"), key=lambda path: path.stat().st_mtime_ns)
        return str(found[-1].parent) if found else None

    for record in of_rank_0(in_memory):
        if all(of_all(has_whole, record)):
            _whole.add(record.save)
            of_rank_0(_write_missing, record)
            return record.checkpoint
        _damaged.add(record.save)
        if rank == 0:
            warnings.warn(f"the checkpoint {record.checkpoint} is not whole in memory")
        if of_rank_0(_is_in_folder, record):
            return record.checkpoint
    return of_rank_0(on_disk)


class InMemoryWriter(FileSystemWriter):
    """Keeps the newest checkpoint in memory that flow-launch owns, and writes it to its folder, as `FileSystemWriter` does. A job that
    `flow-launch --max-restarts` restarts loads it from the memory with `InMemoryReader`. Give it to `async_save` of threads, once for
    all saves, with the folder as `checkpoint_id`. All ranks of the job save, on one machine, and all checkpoints are in one folder."""

    def __init__(self):
        super().__init__("", sync_files=False)
        own_path()
        self._staged = None  # what was staged last
        self._saved = lambda: None  # what the last save has of it

    def __getstate__(self):
        # Another process has copies of its own.
        return {**self.__dict__, "_staged": None, "_saved": None}

    def __setstate__(self, state):
        self.__dict__.update(state, _saved=lambda: None)

    def stage(self, state_dict):
        """Copies the state, into the memory of the copy before, unless a save has that still."""
        before = self._staged if self._saved() is None else None
        self._staged = restage(state_dict, before, lambda value: super(InMemoryWriter, self).stage({"": value})[""])
        staged = Staged(self._staged)
        self._saved = weakref.ref(staged)
        return staged

    def reset(self, checkpoint_id=None):
        if not checkpoint_id:
            raise ValueError("give the checkpoint's folder as checkpoint_id")
        super().reset(checkpoint_id)
        _saving.folder = self.path.absolute()

    # PyTorch passes the options to what has "kwargs" only.
    def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
        if not kwargs.get("use_collectives", True):
            raise RuntimeError("use_collectives=False makes no checkpoint in memory: leave it out, or save with FileSystemWriter")
        if not _saving.folder:
            raise ValueError("give the checkpoint's folder as checkpoint_id")
        self._is_coordinator = is_coordinator
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan):
        return dataclasses.replace(plan, storage_data=(_launcher(), own_path()))

    def prepare_global_plan(self, plans):
        if not all(plan.usable for plan in plans):
            raise RuntimeError("enable_plan_caching=True makes no checkpoint in memory: leave it out, or save with FileSystemWriter")
        if len({plan.storage_data[0] for plan in plans}) > 1:
            raise RuntimeError("the ranks are of several flow-launches, and do not find each other's memory: save with FileSystemWriter")
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
        if len(plans) < ranks:
            reason = f"{len(plans)} of {ranks} ranks save, and only all together have checkpoints in memory"
            raise RuntimeError(f"{reason}: save with FileSystemWriter")
        found = _checkpoints()
        for record in found:
            if Path(record.checkpoint).parent != _saving.folder.parent:
                reason = f"the memory has {record.checkpoint}, and a job has checkpoints of one folder there"
                raise RuntimeError(f"{reason}: save with FileSystemWriter")
        number = found[0].number + 1 if found else 1
        kept = next((record.save for record in found if record.save not in _damaged), "")
        save = uuid.uuid4().hex
        _saving.memories = {f"__{rank}_0.distcp": plan.storage_data[1] for rank, plan in enumerate(plans)}
        return [
            dataclasses.replace(plan, storage_data=_Place(f"__{rank}_", number, save, kept)) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan, planner):
        place = plan.storage_data
        _saving.memory = None  # Where another rank has failed, a save of this thread has left it open.
        with ExitStack() as stack:
            memory = stack.enter_context(Memory(own_path()))
            memory.lock()
            slot = memory.begin(place.kept)
            with self._in(memory, STARTS[slot]) as files:
                written = super().write_data(plan, planner)
            record = Record(str(_saving.folder), place.number, place.save, files.files, {})
            if self._is_coordinator:
                _saving.memory = memory
                _saving.slot = slot
                _saving.record = record
                _saving.end = files.end
                stack.pop_all()  # It has the lock until the end.
            else:
                memory.commit(slot, record, files.end)
        return written

    def finish(self, metadata, results):
        with _saving.memory as memory:
            record = _saving.record
            with self._in(memory, _saving.end) as files:
                super().finish(metadata, results)
            record.files.update(files.files)
            record.memories = {**_saving.memories, _METADATA: own_path()}
            memory.commit(_saving.slot, record, files.end)
            _write(record)
        _saving.memory = None

    @contextmanager
    def _in(self, memory, start):
        """Has files written to the memory."""
        usual = self.fs
        self.fs = _Written(memory, start)
        try:
            yield self.fs
        finally:
            self.fs = usual


def _write(record):
    """Writes a checkpoint to its folder, `.metadata` last."""
    folder = Path(record.checkpoint)
    file = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _METADATA).unlink(missing_ok=True)
        for name in record.memories:
            file = folder / name
            _write_file(record, name, file)
        _sync(folder)
        _sync(folder.parent)
    except OSError as error:
        raise RuntimeError(f"cannot write {file}: {error.strerror}") from error


def _write_file(record, name, path):
    """Writes a file of a checkpoint: it is whole or not there."""
    new = path.with_name(f"{name}.tmp")
    found = sha256()
    with Memory(record.memories[name]) as memory:
        start, length, digest = _part(memory, record, name)
        span = Span(memory.file, start, length)
        try:
            with open(new, "wb") as file:
                while block := span.read(_BLOCK):
                    found.update(block)
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
            if span.tell() != length or found.hexdigest() != digest:
                raise _damage(path)
            os.rename(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


def _sync(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_missing(record):
    """Writes a checkpoint to its folder, if it is only in memory. Where that fails the memory has it."""
    if _is_in_folder(record):
        return
    try:
        with Memory(own_path()) as memory:
            memory.lock()
            _write(record)
    except RuntimeError as error:
        warnings.warn(f"the checkpoint {record.checkpoint} is only in memory: {error}")


class InMemoryReader(FileSystemReader):
    """Loads a checkpoint from the memory, if it is there, or else from its folder."""

    def read_metadata(self, *arguments, **options):
        path = str(self.path.absolute())
        found = [record for record in _checkpoints() if record.checkpoint == path and record.save not in _damaged]
        # The newest of those that are known to be whole, or else of all.
        found.sort(key=lambda record: record.save not in _whole)
        self.fs = _Found(found[0]) if found else FileSystem()
        return super().read_metadata(*arguments, **options)
