"""PyTorch's own ways to start a job, once they are flow-launch's.

usage: patched.py PORT
"""

import argparse
import os
import sys

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import flow_launch.run
from flow_launch.patch import patch


def who():
    return os.environ["RANK"], "FLOW_STORE" in os.environ


if __name__ == "__main__":
    patch()
    config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="a-job", max_restarts=0)
    print(elastic_launch(config, who)())
    script = [os.path.join(os.path.dirname(__file__), "worker.py"), "--nproc-per-node", "x"]
    # Its default, 29500, may be another test's.
    torch.distributed.run.main(["--nproc-per-node", "2", "--master-port", sys.argv[1], *script])
    parsed = torch.distributed.run.get_args_parser().parse_args(["--nproc-per-node=2", "--standalone", *script])
    torch.distributed.run.run(argparse.Namespace(**vars(parsed)))
    flow_launch.run.run(parsed)
    try:
        flow_launch.run.main(["--no-python", "false"])
    except ChildFailedError as error:
        print("exit code", error.get_first_failure()[1].exitcode)
