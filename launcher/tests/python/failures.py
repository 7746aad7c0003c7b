"""What elastic_launch raises."""

import os
import signal
import subprocess
import sys
import time

import flow_launch
from flow_launch import LaunchConfig, elastic_launch


def fail(how):
    if os.environ["RANK"] == "0":
        time.sleep(1000)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        sys.exit(7)
    raise ValueError("no class has number 12")


if __name__ == "__main__":
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=0)
    for how in ["exception", "signal", "exit"]:
        try:
            elastic_launch(config, fail)(how)
        except flow_launch.ChildFailedError as error:
            rank, failure = error.get_first_failure()
            message = failure.message["message"] if isinstance(failure.message, dict) else ""
            others = {rank: failure.exitcode for rank, failure in error.failures.items()}
            package = type(error).__module__.split(".")[0]
            print(package, error.name, rank, failure.local_rank, failure.exitcode, others, message)
    try:
        elastic_launch(LaunchConfig(1, 2, 2), fail)("not at all")
    except subprocess.CalledProcessError as error:
        print("flow-launch's exit code is", error.returncode)
    try:
        elastic_launch(config, lambda: 0)()
    except TypeError as error:
        print(str(error).split(":")[0])
