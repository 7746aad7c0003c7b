"""A launcher that is itself a worker: the error goes on to whoever has started it."""

from torch.distributed.elastic.multiprocessing.errors import record

from flow_launch import LaunchConfig, elastic_launch


def fail():
    raise ValueError("no class has number 12")


@record
def main():
    elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, max_restarts=0), fail)()


if __name__ == "__main__":
    main()
