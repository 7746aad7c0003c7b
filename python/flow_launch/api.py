"""The interface of `torch.distributed.launcher.api`: same names, same arguments, same results."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from typing import Any, Callable

from . import call, job


@dataclass
class DefaultLogsSpecs:
    """The choice of what goes to files: see `--log-dir`, `--redirects`, `--tee` and `--local-ranks-filter` of flow-launch.

    `redirects` and `tee` are 0 (none), 1 (stdout), 2 (stderr), 3 (both), or a dict of these by local rank.
    """

    log_dir: str | None = None
    redirects: int | dict[int, int] = 0
    tee: int | dict[int, int] = 0
    local_ranks_filter: set[int] | None = None


@dataclass
class LaunchConfig:
    """A job; the fields are those of PyTorch's class of this name.

    These differ: `rdzv_backend` is "c10d" where none is given (PyTorch's "etcd" is no service of flow-launch's), and
    `monitor_interval`, `start_method` and `metrics_cfg` mean nothing: flow-launch does not poll, each worker is a
    program of its own, and there are no metrics.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: Any = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "c10d"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False

    def __post_init__(self):
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout


class elastic_launch:
    """Starts a job: `elastic_launch(config, entrypoint)(*arguments)`.

    The entry point is a function, or a command (a program, or a list of it and its first arguments). Returns what the
    function returned on each of this node's workers, by global rank; for a command None. Where a worker fails, this
    raises `ChildFailedError`: PyTorch's if there is PyTorch.
    """

    def __init__(self, config: LaunchConfig, entrypoint: Callable | str | list[str]):
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args):
        return launch_agent(self._config, self._entrypoint, list(args))


def launch_agent(config, entrypoint: Callable | str | list[str], args: list[Any]) -> dict[int, Any]:
    """Does what `elastic_launch` says. The configuration may also be one of PyTorch's."""
    environment = {}
    if config.log_line_prefix_template is not None:
        environment["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = config.log_line_prefix_template
    start = [*flags(config), "--no-python"]
    if not callable(entrypoint):
        command = [entrypoint] if isinstance(entrypoint, str) else list(entrypoint)
        command += map(str, args)
        return dict.fromkeys(job.run([*start, *command], _name(command), config.signals_to_handle, environment))
    with tempfile.TemporaryFile() as called, tempfile.TemporaryFile() as returned:
        call.write(called, entrypoint, args)
        command = call.command(job.path(called), job.path(returned))
        ranks = job.run([*start, *command], getattr(entrypoint, "__name__", type(entrypoint).__name__), config.signals_to_handle, environment)
        results = call.results(returned)
        return {rank: results.get(rank) for rank in ranks}


def _name(command: list[str]) -> str:
    """Returns a command's name in reports: for Python, the script."""
    if os.path.basename(command[0]).startswith("python"):
        return next((word for word in command[1:] if not word.startswith("-")), command[0])
    return command[0]


def flags(config) -> list[str]:
    """The flags of flow-launch for a configuration."""
    logs = config.logs_specs
    numa = config.numa_options
    values = {
        "nnodes": f"{config.min_nodes}:{config.max_nodes}",
        "nproc-per-node": config.nproc_per_node,
        "rdzv-id": config.run_id,
        "role": config.role,
        "max-restarts": config.max_restarts,
        "local-addr": config.local_addr,
        "event-log-handler": None if config.event_log_handler == "null" else config.event_log_handler,
        "numa-binding": numa and numa.affinity_mode.value,
        "signals-to-handle": config.signals_to_handle,
        "duplicate-stdout-filters": _texts(config.duplicate_stdout_filters),
        "duplicate-stderr-filters": _texts(config.duplicate_stderr_filters),
        "log-dir": _of_logs(logs, "log_dir") or _of_logs(logs, "root_log_dir"),
        "redirects": _streams(_of_logs(logs, "redirects")),
        "tee": _streams(_of_logs(logs, "tee")),
        "local-ranks-filter": ",".join(map(str, sorted(_of_logs(logs, "local_ranks_filter") or ()))),
        **_meeting(config),
    }
    given = [f"--{name}={value}" for name, value in values.items() if value not in (None, "")]
    return given + ["--virtual-local-rank"] * config.virtual_local_rank


def _meeting(config) -> dict[str, Any]:
    """Returns the flags by which nodes meet. One node meets nobody: there only a fixed address counts."""
    conf = dict(config.rdzv_configs)
    node_rank = conf.pop("rank", None)
    if config.rdzv_backend == "static":
        host, _, port = config.rdzv_endpoint.rpartition(":")
        values = {"master-addr": host.strip("[]"), "master-port": port, "node-rank": node_rank}
    elif config.max_nodes > 1:
        values = {"rdzv-backend": config.rdzv_backend, "rdzv-endpoint": config.rdzv_endpoint}
    else:
        return {}
    return {**values, "rdzv-conf": ",".join(f"{key}={value}" for key, value in conf.items())}


def _of_logs(logs, name: str):
    """PyTorch's class keeps to itself what it is given."""
    return getattr(logs, name, None) or getattr(logs, f"_{name}", None)


def _streams(streams: int | dict[int, int] | None) -> str | None:
    if isinstance(streams, dict):
        return ",".join(f"{local_rank}:{int(which)}" for local_rank, which in streams.items())
    return streams and str(int(streams))


def _texts(texts: list[str] | None) -> str:
    return ",".join(text.replace(",", ",,") for text in texts or ())
