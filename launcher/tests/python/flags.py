"""The flags for configurations of both kinds."""

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig
from torch.numa.binding import AffinityMode, NumaOptions

import flow_launch
from flow_launch.api import flags

for config, logs in [(LaunchConfig, DefaultLogsSpecs), (flow_launch.LaunchConfig, flow_launch.DefaultLogsSpecs)]:
    specs = logs(log_dir="/tmp", redirects=Std.OUT, tee={0: Std.ALL, 1: Std.ERR}, local_ranks_filter={1, 0})
    several = config(
        min_nodes=1,
        max_nodes=2,
        nproc_per_node=3,
        logs_specs=specs,
        run_id="a-job",
        role="actor",
        rdzv_endpoint="[::1]:29400",
        rdzv_backend="c10d",
        rdzv_configs={"join_timeout": 60},
        max_restarts=4,
        local_addr="127.0.0.1",
        numa_options=NumaOptions(affinity_mode=AffinityMode.NODE),
        signals_to_handle="SIGTERM,SIGUSR1",
        duplicate_stdout_filters=["a,b", "c"],
        virtual_local_rank=True,
    )
    print(*flags(several))
    conf = {"rank": 1, "timeout": 9}
    static = config(2, 2, 1, run_id="x", rdzv_endpoint="[::1]:29500", rdzv_backend="static", rdzv_configs=conf)
    static.logs_specs = None
    print(*flags(static))
