"""Checkpoints of torch.distributed.checkpoint in memory that flow-launch owns, and that outlives the ranks: see docs/torch.md.

A rank's memory has two checkpoints at most: of each the files that the rank has written, and a record of them.

| bytes | contents |
|---|---|
| from 0 and from 64 on | a header for each: where its record is, the record's length and its SHA-256 |
| from 4096 and from 2^40 on | the files of each, and the record. There is no memory behind what is never written |

The coordinator's record is the last one. So a checkpoint is whole or not there, whenever ranks are killed.
"""

import dataclasses
import fcntl
import hashlib
import io
import json
import mmap
import os
import shutil
import struct
import uuid
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

__all__ = ["InMemoryReader", "InMemoryWriter", "latest"]

_VARIABLE = "FLOW_CHECKPOINT_MEMORY"
_TARGET = "/memfd:flow-checkpoint (deleted)"
_METADATA = ".metadata"
_HEADER = struct.Struct("<QQ32s")
_HEADERS = 0, 64
_STARTS = 4096, 1 << 40
# Bytes that go to the disk at once.
_BLOCK = 8 << 20
# Python has nothing faster on a CPU with instructions for it.
_hash = hashlib.sha256
# The saves whose files `latest` has found to be whole.
_whole = set()


@dataclasses.dataclass
class _Record:
    """What a rank has written of a checkpoint."""

    checkpoint: str  # its folder
    number: int  # counts up
    save: str  # no other save has the same
    files: dict  # by names: first byte, length, sum
    memories: dict  # of the coordinator: the path of the memory that has a file, by names


@dataclasses.dataclass(frozen=True)
class _Place:
    """What the coordinator tells a rank of a save."""

    prefix: str
    number: int
    save: str
    kept: str  # the save that stays until this one is whole


class _Memory:
    """A rank's memory, open."""

    def __init__(self, path):
        if not _is_memory(path):
            raise RuntimeError(f"{path} is not flow-launch's memory: run the program where flow-launch runs, as its user")
        self.file = open(path, "r+b", buffering=0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def lock(self):
        """Locks it until it is closed."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError("another save of this rank has the memory: wait for that before") from None

    def records(self):
        """The records that are whole, by the number of their slot."""
        found = {}
        for slot, at in enumerate(_HEADERS):
            header = os.pread(self.file.fileno(), _HEADER.size, at)
            if len(header) < _HEADER.size:
                continue
            start, length, digest = _HEADER.unpack(header)
            if not start + length <= os.fstat(self.file.fileno()).st_size:
                continue
            text = self.read(start, length)
            if _hash(text).digest() == digest:
                found[slot] = _Record(**json.loads(text))
        return found

    def read(self, start, length):
        return _Span(self.file, start, length).readall()

    def sum(self, start, length):
        if not length:
            return _hash(b"").hexdigest()
        before = start % mmap.PAGESIZE
        with mmap.mmap(self.file.fileno(), before + length, access=mmap.ACCESS_READ, offset=start - before) as mapped:
            with memoryview(mapped) as view, view[before:] as part:
                return _hash(part).hexdigest()

    def begin(self, kept):
        """Returns the slot of what is not the save `kept`, and forgets what is there."""
        slots = [slot for slot, record in self.records().items() if record.save == kept]
        slot = 1 - slots[0] if slots else 0
        if slots:
            os.pwrite(self.file.fileno(), bytes(_HEADER.size), _HEADERS[slot])
        else:
            self.file.truncate(0)
        return slot

    def commit(self, slot, record, end):
        """Writes the record of what the slot has up to `end`."""
        text = json.dumps(dataclasses.asdict(record)).encode()
        _Span(self.file, end).write(text)
        os.pwrite(self.file.fileno(), _HEADER.pack(end, len(text), _hash(text).digest()), _HEADERS[slot])


class _Span(io.RawIOBase):
    """The bytes of a file from `start` on, as a file. It grows, or has `length` bytes."""

    def __init__(self, file, start, length=0):
        self.descriptor, self.start, self.length, self.at = file.fileno(), start, length, 0

    def readable(self):
        return True

    writable = seekable = readable

    def seek(self, offset, whence=os.SEEK_SET):
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence]
        return self.at

    def tell(self):
        return self.at

    def readinto(self, buffer):
        with memoryview(buffer).cast("B") as view:
            count = max(0, min(len(view), self.length - self.at))
            read = os.preadv(self.descriptor, [view[:count]], self.start + self.at)
        self.at += read
        return read

    def write(self, data):
        with memoryview(data).cast("B") as view:
            written = 0
            while written < len(view):
                written += os.pwrite(self.descriptor, view[written:], self.start + self.at + written)
        self.at += written
        self.length = max(self.length, self.at)
        return written


class _Written(FileSystem):
    """Files that are written to a memory, one behind the other, from `end` on."""

    def __init__(self, memory, end):
        self.memory, self.end, self.files = memory, end, {}

    @contextmanager
    def create_stream(self, path, mode):
        span = _Span(self.memory.file, self.end)
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
        with _Memory(self.record.memories[path.name]) as memory:
            start, length, digest = _part(memory, self.record, path.name)
            if self.record.save not in _whole and memory.sum(start, length) != digest:
                raise RuntimeError(f"{path} is damaged in memory; load it from its folder, or another checkpoint")
            yield io.BufferedReader(_Span(memory.file, start, length))


def _is_memory(path):
    try:
        return os.readlink(path) == _TARGET
    except OSError:
        return False


def _own():
    """The path of this rank's memory."""
    path = os.environ.get(_VARIABLE)
    if not path:
        raise RuntimeError(f"{_VARIABLE} is not set: start the program with flow-launch, or save with FileSystemWriter")
    return path


def _launcher():
    """The flow-launch that owns this rank's memory: no other one, on any machine, has the same."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid"), os.path.dirname(_own())


def _part(memory, whole, name):
    """Where a memory has the file of a checkpoint; None if it has it no more."""
    records = [record for record in memory.records().values() if record.save == whole.save]
    return next((record.files[name] for record in records if name in record.files), None)


def _checkpoints():
    """The coordinators' records of the checkpoints whose files are all in memories of this machine, the newest first."""
    folder = os.path.dirname(_own())
    found = []
    for name in os.listdir(folder):
        if _is_memory(os.path.join(folder, name)):
            with _Memory(os.path.join(folder, name)) as memory:
                found += [record for record in memory.records().values() if _METADATA in record.files]
    found = [record for record in found if all(_has(record, name) for name in record.memories)]
    return sorted(found, key=lambda record: (record.number, record.save), reverse=True)


def _has(record, name):
    """Whether a file of a checkpoint is there."""
    if not _is_memory(record.memories[name]):
        return False
    with _Memory(record.memories[name]) as memory:
        return _part(memory, record, name) is not None


def _is_whole(record, name):
    """Whether a file of a checkpoint has its sum."""
    with _Memory(record.memories[name]) as memory:
        start, length, digest = _part(memory, record, name)
        return memory.sum(start, length) == digest


def latest(folder, process_group=None):
    """Returns the path of the newest checkpoint in `folder`, which is whole: in memory, where its sums are checked, or else on the disk. None if
    there is none. All ranks of the group call this."""
    group = process_group if dist.is_initialized() else None
    rank, size = (dist.get_rank(process_group), dist.get_world_size(process_group)) if dist.is_initialized() else (0, 1)

    def of_all(own):
        if size == 1:
            return [own]
        all_own = [None] * size
        dist.all_gather_object(all_own, own, group)
        return all_own

    own = {record.save: record for record in _checkpoints() if Path(record.checkpoint).parent == Path(folder).absolute()}
    for save, path in of_all([(record.save, record.checkpoint) for record in own.values()])[0]:
        # Each rank checks some of the files.
        is_whole = save in own and all(_is_whole(own[save], name) for name in sorted(own[save].memories)[rank::size])
        if all(of_all(is_whole)):
            _whole.add(save)
            return path
        if rank == 0:
            warnings.warn(f"the checkpoint {path} is not whole in memory")
    on_disk = sorted(Path(folder).absolute().glob(f"*/{_METADATA}"), key=lambda path: path.stat().st_mtime_ns)
    return of_all(str(on_disk[-1].parent) if on_disk else None)[0]


class InMemoryWriter(FileSystemWriter):
    """Keeps the newest checkpoint in memory that flow-launch owns, and writes it to its folder, as `FileSystemWriter` does. A job that
    `flow-launch --max-restarts` restarts loads it from the memory with `InMemoryReader`. Give it to `async_save` of threads, once for
    all saves, with the folder as `checkpoint_id`. All ranks are on one machine."""

    def __init__(self):
        super().__init__("", sync_files=False)
        _own()

    def reset(self, checkpoint_id=None):
        if not checkpoint_id:
            raise ValueError("give the checkpoint's folder as checkpoint_id")
        super().reset(checkpoint_id)

    def prepare_local_plan(self, plan):
        return dataclasses.replace(plan, storage_data=(_launcher(), _own()))

    def prepare_global_plan(self, plans):
        if len({plan.storage_data[0] for plan in plans}) > 1:
            raise RuntimeError("the ranks are of several flow-launches, and do not find each other's memory: save with FileSystemWriter")
        newest = next(iter(_checkpoints()), None)
        number, kept = (newest.number + 1, newest.save) if newest else (1, "")
        save = uuid.uuid4().hex
        self._memories = {f"__{rank}_0.distcp": plan.storage_data[1] for rank, plan in enumerate(plans)}
        return [
            dataclasses.replace(plan, storage_data=_Place(f"__{rank}_", number, save, kept)) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan, planner):
        place = plan.storage_data
        with _Memory(_own()) as memory:
            memory.lock()
            self._slot = memory.begin(place.kept)
            with self._in(memory, _STARTS[self._slot]) as files:
                written = super().write_data(plan, planner)
            self._record = _Record(str(self.path.absolute()), place.number, place.save, files.files, {})
            self._end = files.end
            if not self._is_coordinator:
                memory.commit(self._slot, self._record, self._end)
        return written

    def set_up_storage_writer(self, is_coordinator, *arguments, **options):
        self._is_coordinator = is_coordinator
        super().set_up_storage_writer(is_coordinator, *arguments, **options)

    def finish(self, metadata, results):
        with _Memory(_own()) as memory:
            memory.lock()
            with self._in(memory, self._end) as files:
                super().finish(metadata, results)
            self._record.files.update(files.files)
            self._record.memories = {**self._memories, _METADATA: _own()}
            memory.commit(self._slot, self._record, files.end)
        _write(self._record)

    @contextmanager
    def _in(self, memory, start):
        """Has files written to the memory."""
        usual, self.fs = self.fs, _Written(memory, start)
        try:
            yield self.fs
        finally:
            self.fs = usual


def _write(record):
    """Writes a checkpoint to its folder, `.metadata` last."""
    folder = Path(record.checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _METADATA).unlink(missing_ok=True)
    for name, path in record.memories.items():
        with _Memory(path) as memory, open(folder / f"{name}.tmp", "wb", buffering=0) as file:
            start, length, _ = _part(memory, record, name)
            try:
                shutil.copyfileobj(_Span(memory.file, start, length), file, _BLOCK)
                os.fsync(file.fileno())
            except OSError as error:
                raise RuntimeError(f"cannot write {folder / name}: {error.strerror}") from error
        os.rename(folder / f"{name}.tmp", folder / name)
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class InMemoryReader(FileSystemReader):
    """Loads a checkpoint from the memory, if it is there, or else from its folder."""

    def read_metadata(self, *arguments, **options):
        path = str(self.path.absolute())
        found = next((record for record in _checkpoints() if record.checkpoint == path), None)
        self.fs = _Found(found) if found else FileSystem()
        return super().read_metadata(*arguments, **options)
