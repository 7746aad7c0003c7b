"""Workers that tell their pids, and flow-launch's and ours, and sleep."""

import os
import time

from flow_launch import LaunchConfig, elastic_launch
from flow_launch.errors import class_named


def sleep(pid):
    print(pid, os.getppid(), os.getpid(), flush=True)
    time.sleep(1000)


if __name__ == "__main__":
    try:
        elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2), sleep)(os.getpid())
    except class_named("SignalException") as error:
        print(error, error.sigval.name)
