"""One of two nodes: what its own workers return, by global rank."""

import os
import sys

from flow_launch import LaunchConfig, elastic_launch


def rank_of_all():
    return f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}"


if __name__ == "__main__":
    backend, endpoint, node = sys.argv[1:]
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=1,
        run_id="a-job",
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        rdzv_configs={"rank": int(node)} if backend == "static" else {"join_timeout": 60},
    )
    print(elastic_launch(config, rank_of_all)())
