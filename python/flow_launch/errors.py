"""Exceptions for workers that fail: PyTorch's own classes where there is PyTorch, else these, which are like them."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, field
from datetime import datetime


@dataclass
class ProcessFailure:
    """The failure of a worker. The exit code is minus the signal's number where one ended it."""

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    message: str | dict = field(init=False, default="")
    timestamp: int = field(init=False, default=0)

    def __post_init__(self):
        if os.path.isfile(self.error_file):
            with open(self.error_file) as file:
                recorded = json.load(file)
            self.message = recorded["message"]
            extra = recorded if isinstance(self.message, str) else self.message["extraInfo"]
            self.timestamp = int(extra["timestamp"])
        elif self.exitcode < 0:
            self.message = f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"

    def signal_name(self) -> str:
        return signal.Signals(-self.exitcode).name


class ChildFailedError(Exception):
    """Workers have failed. `failures` has them by global rank."""

    def __init__(self, name: str, failures: dict[int, ProcessFailure]):
        self.name = name
        self.failures = failures
        rank, first = self.get_first_failure()
        message = first.message
        if isinstance(message, dict):
            message = message["message"]
        super().__init__(f"{name} FAILED: rank {rank}, exit code {first.exitcode} (pid {first.pid}) {message}".rstrip())

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """The rank that failed first, and how."""
        return min(self.failures.items(), key=lambda item: item[1].timestamp)


class SignalException(Exception):
    """A signal has ended the job."""

    def __init__(self, msg: str, sigval: signal.Signals):
        super().__init__(msg)
        self.sigval = sigval


def class_named(name: str):
    """The class to raise of those above: PyTorch's, or the one here."""
    try:
        from torch.distributed.elastic import multiprocessing
        from torch.distributed.elastic.multiprocessing import errors
    except ImportError:
        return globals()[name]
    return getattr(errors, name, None) or getattr(multiprocessing, name)


def child_failed(name: str, events: list[dict], error_file: str) -> Exception | None:
    """The error for these events of one start, if workers failed. The file is for what the first one has recorded."""
    exits = {event["rank"]: event for event in events if event["event"] == "exit" and event.get("code") != 0}
    if not exits:
        return None
    # It may have been on another node, and is then none of these.
    last = next((event for event in events if event["event"] == "end"), {})
    first = last["rank"] if last.get("rank") in exits else next(iter(exits))
    failures = {first: _process_failure(exits.pop(first), error_file)}
    for rank, event in exits.items():
        failures[rank] = _process_failure(event)
        # get_first_failure() takes the earliest.
        failures[rank].timestamp = max(failures[rank].timestamp, failures[first].timestamp)
    return class_named("ChildFailedError")(name, failures)


def _process_failure(event: dict, error_file: str = ""):
    code = event["code"] if "code" in event else -event["signal"]
    fields = {"local_rank": event["local_rank"], "pid": event["pid"], "exitcode": code}
    if error_file and os.path.getsize(error_file):
        try:
            return class_named("ProcessFailure")(**fields, error_file=error_file)
        except (AttributeError, LookupError, TypeError, ValueError):
            pass  # It is as the worker has written it.
    failure = class_named("ProcessFailure")(**fields, error_file="")
    failure.timestamp = int(datetime.fromisoformat(event["time"].replace("Z", "+00:00")).timestamp())
    return failure
