"""flow-launch from Python: the interface of `torch.distributed.launcher`, without PyTorch.

    from flow_launch import LaunchConfig, elastic_launch

    losses = elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2), train)("data")  # by rank

`python -m flow_launch.run` is to flow-launch what `python -m torch.distributed.run` is to torchrun.
"""

from .api import DefaultLogsSpecs, LaunchConfig, elastic_launch, launch_agent

__all__ = ["ChildFailedError", "DefaultLogsSpecs", "LaunchConfig", "elastic_launch", "launch_agent"]


def __getattr__(name):
    # PyTorch's where there is PyTorch, which is imported for it: so not before it is asked for.
    if name == "ChildFailedError":
        from .errors import class_named

        return class_named(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
