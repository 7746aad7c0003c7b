"""What elastic_launch takes beside plain functions and flags, and what it leaves behind."""

import functools
import gc
import os
import signal
import subprocess
import sys

import flow_launch
from flow_launch import LaunchConfig, elastic_launch, run


class Callable:
    def __call__(self):
        return "an object"


def greet(word):
    return word, sys.flags.optimize


def fail():
    sys.exit(7)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, max_restarts=0)
    print(elastic_launch(config, functools.partial(greet, "partial"))())
    print(elastic_launch(config, Callable())())
    # Signals that cannot be caught are passed over, and the others are as before.
    config.signals_to_handle = "SIGTERM,SIGKILL,SIGSTOP"
    print(elastic_launch(config, greet)("signals"), signal.getsignal(signal.SIGTERM).name)
    events = sys.argv[1]
    try:
        run.main(["--events", events, "--no-python", "sh", "-c", "echo events: $FLOW_LAUNCHER_EVENTS; exit 3"])
    except flow_launch.ChildFailedError as error:
        print("exit code", error.get_first_failure()[1].exitcode)
    try:
        run.main(["--hosts", "localhost:1", "--no-python", "sh", "-c", "exit 4"])
    except subprocess.CalledProcessError as error:
        print("exit code", error.returncode)
    gc.disable()
    before = None
    for _ in range(3):
        try:
            elastic_launch(config, fail)()
        except flow_launch.ChildFailedError:
            pass
        before = before or descriptors()
    print("left open:", descriptors() - before)
