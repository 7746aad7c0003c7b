"""A function call on each worker: how it gets there, and what it returns gets back.

A worker is a new Python that is prepared as multiprocessing prepares those that it spawns, so that functions of the
main script can be called, too.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from multiprocessing import spawn
from typing import Any, Callable


def write(file, function: Callable, arguments: list[Any]):
    """Writes down what a worker is to call. What cannot be written down is a `TypeError`."""
    preparation = spawn.get_preparation_data("worker")
    preparation["authkey"] = bytes(preparation["authkey"])
    # A worker can only import what comes from a file: of a notebook, or of `python -c`, it gets functions themselves.
    has_main = "init_main_from_path" in preparation or "init_main_from_name" in preparation
    is_importable = has_main or getattr(function, "__module__", None) != "__main__"
    pickled = _pickle(function, arguments, is_importable)
    pickle.dump(preparation, file)
    file.write(pickled)
    file.flush()


def _pickle(function: Callable, arguments: list[Any], is_importable: bool) -> bytes:
    name = getattr(function, "__qualname__", function)
    problem = "it is defined where workers cannot import it"
    if is_importable:
        try:
            return pickle.dumps((function, arguments))
        except Exception as error:  # Which one depends on the object.
            problem = str(error)
    try:
        import cloudpickle
    except ImportError:
        message = f"{name} and its arguments cannot be sent to workers: {problem}"
        raise TypeError(f"{message}; define it at the top level of a module, or install cloudpickle") from None
    try:
        return cloudpickle.dumps((function, arguments))
    except Exception as error:
        raise TypeError(f"{name} and its arguments cannot be sent to workers: {error}") from error


def command(called: str, returned: str) -> list[str]:
    """The command of a worker, for the paths of what it is to call and of where it is to put what that returns."""
    worker = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_worker.py")
    options = subprocess._args_from_interpreter_flags()  # such as -O and -W, as multiprocessing passes them on
    return [sys.executable, *options, "-u", worker, called, returned]


def results(file) -> dict[int, Any]:
    """Reads the workers' results, by rank; of a rank that was started again, the last."""
    file.seek(0)
    found = {}
    while True:
        try:
            rank, result = pickle.load(file)
        except EOFError:
            return {rank: pickle.loads(result) for rank, result in found.items()}
        found[rank] = result
