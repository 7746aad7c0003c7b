"""A rank's memory, which flow-launch owns: where checkpoints of torch.distributed.checkpoint are in it.

A rank's memory has two checkpoints at most: of each the files that the rank has written, and a record of them.

| bytes | contents |
|---|---|
| from 0 and from 64 on | a header for each: where its record is, the record's length and its SHA-256 |
| from 4096 and from 2^40 on | the files of each, and the record. There is no memory behind what is never written |
"""

import dataclasses
import fcntl
import hashlib
import io
import json
import mmap
import os
import struct
import time

_VARIABLE = "FLOW_CHECKPOINT_MEMORY"
_TARGET = "/memfd:flow-checkpoint (deleted)"
_HEADER = struct.Struct("<QQ32s")
_HEADERS = 0, 64
STARTS = 4096, 1 << 40
# Seconds for which a thread whose save has failed may still hold the lock.
_ENDING = 10
# Python has nothing faster on a CPU with instructions for it.
sha256 = hashlib.sha256


@dataclasses.dataclass
class Record:
    """What a rank has written of a checkpoint."""

    checkpoint: str  # its folder
    number: int  # counts up
    save: str  # no other save has the same
    files: dict  # by names: first byte, length, sum
    memories: dict  # of the coordinator: the path of the memory that has a file, by names


class Memory:
    """A rank's memory, open."""

    file = None

    def __init__(self, path):
        self.process = os.getpid()
        if not is_memory(path):
            raise RuntimeError(f"{path} is not flow-launch's memory: run the program where flow-launch runs, as its user")
        self.file = open(path, "r+b", buffering=0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        self.close()

    def close(self):
        if self.file and not self.file.closed:
            # A process that was forked meanwhile has the file, and with it the lock.
            if os.getpid() == self.process:
                fcntl.flock(self.file, fcntl.LOCK_UN)
            self.file.close()

    def lock(self):
        """Locks it until it is closed."""
        end = time.monotonic() + _ENDING
        while True:
            try:
                return fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    reason = "another save of this rank, or Checkpoints of Rust, has the memory: wait for that before"
                    raise RuntimeError(reason) from None
            time.sleep(0.01)

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
            if sha256(text).digest() == digest:
                found[slot] = Record(**json.loads(text))
        return found

    def read(self, start, length):
        return Span(self.file, start, length).readall()

    def sum(self, start, length):
        if not length:
            return sha256(b"").hexdigest()
        before = start % mmap.PAGESIZE
        with mmap.mmap(self.file.fileno(), before + length, access=mmap.ACCESS_READ, offset=start - before) as mapped:
            with memoryview(mapped) as view, view[before:] as part:
                return sha256(part).hexdigest()

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
        Span(self.file, end).write(text)
        os.pwrite(self.file.fileno(), _HEADER.pack(end, len(text), sha256(text).digest()), _HEADERS[slot])


class Span(io.RawIOBase):
    """The bytes of a file from `start` on, as a file. It grows, or has `length` bytes."""

    def __init__(self, file, start, length=0):
        self.descriptor = file.fileno()
        self.start = start
        self.length = length
        self.at = 0

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


def is_memory(path):
    try:
        return os.readlink(path) == _TARGET
    except OSError:
        return False


def own_path():
    """The path of this rank's memory."""
    path = os.environ.get(_VARIABLE)
    if path is None:
        raise RuntimeError(f"{_VARIABLE} is not set: start the program with flow-launch, or save with FileSystemWriter")
    if not path:
        problem = "flow-launch could not make memory for checkpoints (RUST_LOG=info flow-launch says why)"
        raise RuntimeError(f"{problem}: mend that, or save with FileSystemWriter")
    return path
