"""Cases of PyTorch's source, from its folder test/distributed, for scripts/test-torch."""

import re
import sys
import types

# Files, the modules that they import from their own folder, and their classes of cases.
FILES = [
    ("algorithms/test_join.py", [], ["TestJoin"]),
    ("test_c10d_gloo.py", ["test_c10d_common.py"], ["DistributedDataParallelTest", "ReducerTest", "CommTest"]),
    (
        "optim/test_zero_redundancy_optimizer.py",
        [],
        ["TestZeroRedundancyOptimizerSingleRank", "TestZeroRedundancyOptimizerDistributed"],
    ),
]

# What makes a case for GPUs one for CPUs. Those that need several devices a rank, or compare with a GPU, then fail also over gloo: they
# are not on the list.
ON_CPUS = [
    (r"@(common_distributed\.)?skip_if_(lt_x_gpu\(\d\)|no_gpu|rocm_multiprocess)\n", "@(lambda case: case)\n"),
    (r"\.(cuda|to)\((self\.rank|rank|device_id|0|self\.rank % torch\.cuda\.device_count\(\)|)\)", ".cpu()"),
    (r"device_ids=(\[self\.rank\]|\[rank\]|\[device_id\]|\[device\]|device_ids)", "device_ids=None"),
    (r'torch\.device\((f"cuda:[^"]*"|"cuda:" \+ str\([^)]*\)|"cuda"|self\.rank|rank)\)', 'torch.device("cpu")'),
    (r'device=(self\.rank|rank|f"cuda:[^"]*"|"cuda")', 'device="cpu"'),
    (r"torch\.cuda\.device_count\(\)", "8"),
    (r"torch\.cuda\.(synchronize|set_device)\([^)]*\)", "None"),
]

ON_FLOW = [
    # A device of gloo's, which the group of the case has in any case.
    (r"backend = process_group\._get_backend\(device\)\n +backend\.create_device\(interface=LOOPBACK\)", "pass"),
    (r"dist\.Backend\.GLOO", '"flow"'),
    (r'"gloo"', '"flow"'),
]


def classes(folder, backend):
    """The classes of cases, over this backend; their ranks are forked."""
    import torch
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    def fork(self):
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    MultiProcessTestCase._spawn_processes = fork
    replaced = ON_CPUS + (ON_FLOW if backend == "flow" else [])
    found = []
    for file, needed, names in FILES:
        for name in needed:
            load(folder / name, replaced)
        module = load(folder / file, replaced)
        found += [getattr(module, name) for name in names]
    return found


def load(path, replaced):
    """The module, with replacements in its source."""
    source = path.read_text()
    for pattern, text in replaced:
        source = re.sub(pattern, text, source)
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(source, path, "exec"), module.__dict__)
    return module
