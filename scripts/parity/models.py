"""Writes tests/data/parity/models.json: what PyTorch's DistributedDataParallel computes on two ranks, bit for bit.

Run as python3 scripts/parity/models.py: it finds a Python with torch as scripts/torch_python.py says, 2.11.0 if the data are to stay.
It starts itself under torchrun (gloo) twice, and writes only what both runs agree on.

Whoever compares must do the same arithmetic:

Environment. ENVIRONMENT below must be set before libtorch is loaded: without it, kernels are picked by processor, and
their bits differ.

Values. Weights and inputs come from a 32-bit hash, so that they are the same without torch's generator. All arithmetic
is on u32 and wraps; >> shifts in zeros; ^ is exclusive or:

    hash(salt, k):   h = k * 2654435761 + salt
                     h = (h ^ (h >> 16)) * 0x85ebca6b
                     h = (h ^ (h >> 13)) * 0xc2b2ae35
                     h ^ (h >> 16)
    value(salt, k) = ((hash(salt, k) >> 8) / 2^24 - 0.5) * scale    in f32; exact, as every scale is a power of two

A tensor's element k (row-major) is value(salt, k).
- Parameter number p (from 0, in the order listed): salt p + 1, scale as listed. BatchNorm's parameters and buffers
  instead start as 1 (weight), 0 (bias), 0 (running_mean) and 1 (running_var).
- Input of a rank at a step: salt 1000 + 4 * step + 2 * rank, scale 2.
- Its labels, i64: hash(salt + 1, k) % 10, with the input's salt.

Training. STEPS steps; at each, every rank forwards its own BATCH samples in training mode (so BatchNorm uses the
batch's statistics and updates its buffers with momentum 0.1, eps 1e-5; DDP first broadcasts rank 0's buffers), the loss
is the cross entropy's mean over them, then backward with averaged gradients, then SGD with the model's learning rate
and momentum (dampening 0, no weight decay, no Nesterov). The loss stored is the rank's own.

Models, and their parameters in order (shape; scale):
- mlp: input [8, 784]; linear, relu, linear. Rate 0.05, momentum 0.
    fc1.weight [512, 784] 2^-4, fc1.bias [512] 2^-4, fc2.weight [10, 512] 2^-3, fc2.bias [10] 2^-3
- lenet: input [8, 1, 28, 28]; conv 5x5, max-pool 2, conv 5x5, max-pool 2, flatten, linear, relu, linear; no padding,
  stride 1. Rate 0.05, momentum 0.9.
    conv1.weight [32, 1, 5, 5] 2^-1, conv1.bias [32] 2^-1, conv2.weight [64, 32, 5, 5] 2^-4, conv2.bias [64] 2^-4,
    fc1.weight [512, 1024] 2^-4, fc1.bias [512] 2^-4, fc2.weight [10, 512] 2^-3, fc2.bias [10] 2^-3
- batchnorm: input [8, 3, 16, 16]; conv 3x3, batch norm, relu, conv 3x3 with stride 2, batch norm, relu, mean over
  height and width, linear; convolutions have padding 1 and no bias. Rate 0.05, momentum 0.
    conv1.weight [8, 3, 3, 3] 2^-1, bn1.weight [8], bn1.bias [8], conv2.weight [16, 8, 3, 3] 2^-2, bn2.weight [16],
    bn2.bias [16], fc.weight [10, 16] 2^-1, fc.bias [10] 2^-1
    buffers: bn1.running_mean [8], bn1.running_var [8], bn2.running_mean [16], bn2.running_var [16]

Joins. Each model is also trained in DDP.join(), without a hook: rank 0 for 20 steps, rank 1 for 13 of them, gradients
divided by 2 always (`_join`) or by the number of ranks that still train (`_join_by_active`). At the end all ranks have
rank 0's parameters and buffers.

Hooks. Each model is trained once for each entry of HOOKS, which DDP's register_comm_hook gets: as PyTorch does it without
a hook, and with gradients sent in another type. With the latter, `hook` says which type.

Mixed precision. Each model is trained once for each entry of MIXED. Its forward computes with parameters and input that it
casts to this type, buffers are cast once, and gradients are sent in the type, added, and then divided, as DDP's
`mixed_precision` does. The loss is that of the outputs as f32. Buffers are cast to f32 for their checksums. DDP's own
`mixed_precision` needs events, which the CPU does not have. With events that do nothing, PyTorch 2.11 trains with numbers
that differ from run to run, as of memory that nobody has written, so that there is nothing to compare with.

The file. `losses[rank][step]` are f32 bits in hex. Checksums are FNV-1a (64 bits, hex) over a tensor's little-endian
f32 bytes: `initial` and `final` of each parameter, `buffers[rank]` at the end (they differ, as each rank saw its own
last batch), and `inputs[rank]` of the first step's input, to tell a wrong start from wrong arithmetic.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch_python

FILE = Path(__file__).resolve().parent.parent.parent / "tests" / "data" / "parity" / "models.json"
ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
}
TORCH_VERSION = "2.11.0"
WORLD_SIZE, STEPS, BATCH = 2, 20, 8
HOOKS = [None, "fp16", "bf16"]
JOINS = {
    "join": {"steps": [20, 13], "divide_by_initial_world_size": True},
    "join_by_active": {"steps": [20, 13], "divide_by_initial_world_size": False},
}

MIXED = {"mixed_bf16": "bfloat16", "mixed_fp16": "float16"}


def worker(path):
    import numpy
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.functional import cross_entropy, max_pool2d, relu
    from torch.nn.parallel import DistributedDataParallel

    from made import BatchNorm, gathered, labels, values

    class Mlp(nn.Module):
        name, input, rate, momentum = "mlp", (784,), 0.05, 0.0
        scales = {"fc1": 2**-4, "fc2": 2**-3}

        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(784, 512)
            self.fc2 = nn.Linear(512, 10)

        def forward(self, x):
            return self.fc2(relu(self.fc1(x)))

    class LeNet(nn.Module):
        name, input, rate, momentum = "lenet", (1, 28, 28), 0.05, 0.9
        scales = {"conv1": 2**-1, "conv2": 2**-4, "fc1": 2**-4, "fc2": 2**-3}

        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 32, 5)
            self.conv2 = nn.Conv2d(32, 64, 5)
            self.fc1 = nn.Linear(1024, 512)
            self.fc2 = nn.Linear(512, 10)

        def forward(self, x):
            x = max_pool2d(self.conv1(x), 2)
            x = max_pool2d(self.conv2(x), 2)
            return self.fc2(relu(self.fc1(x.flatten(1))))

    class Cast(nn.Module):
        def __init__(self, model, dtype):
            super().__init__()
            self.model, self.dtype = model, dtype
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.to(dtype)

        def forward(self, x):
            parameters = {name: parameter.to(self.dtype) for name, parameter in self.model.named_parameters()}
            return torch.func.functional_call(self.model, parameters, (x.to(self.dtype),))

    def mean_in(dtype):
        def hook(state, bucket):
            work = dist.all_reduce(bucket.buffer().to(dtype), async_op=True)
            return work.get_future().then(lambda future: (future.value()[0] / WORLD_SIZE).float())

        return hook

    def checksum(tensor):
        value = 0xCBF29CE484222325
        for byte in tensor.detach().float().contiguous().numpy().astype("<f4").tobytes():
            value = ((value ^ byte) * 0x100000001B3) % 2**64
        return f"{value:016x}"

    def train(kind, hook=None, join=None, mixed=None):
        model = kind()
        with torch.no_grad():
            for p, (name, parameter) in enumerate(model.named_parameters()):
                scale = kind.scales.get(name.split(".")[0])
                if scale is not None:
                    parameter.copy_(values(p + 1, tuple(parameter.shape), scale))
        names = [name for name, _ in model.named_parameters()]
        initial = [checksum(parameter) for parameter in model.parameters()]
        dtype = getattr(torch, mixed) if mixed else None
        ddp = DistributedDataParallel(Cast(model, dtype) if mixed else model)
        if mixed:
            ddp.register_comm_hook(None, mean_in(dtype))
        if hook:
            compress = getattr(default_hooks, f"{hook}_compress_hook")
            # By another name: DDP refuses bf16_compress_hook by its name where there is no NCCL, though gloo can.
            ddp.register_comm_hook(None, lambda state, bucket: compress(state, bucket))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=kind.rate, momentum=kind.momentum)

        losses, first_input = [], None
        divides = {"divide_by_initial_world_size": join["divide_by_initial_world_size"]} if join else {}
        with ddp.join(enable=join is not None, **divides):
            for step in range(join["steps"][dist.get_rank()] if join else STEPS):
                salt = 1000 + 4 * step + 2 * dist.get_rank()
                x, y = values(salt, (BATCH, *kind.input), 2), labels(salt + 1, BATCH)
                first_input = first_input or checksum(x)
                optimizer.zero_grad()
                loss = cross_entropy(ddp(x).float(), y)
                loss.backward()
                optimizer.step()
                losses.append(f"{loss.detach().numpy().view(numpy.uint32):08x}")

        final = [checksum(parameter) for parameter in model.parameters()]
        assert gathered(final) == [final] * WORLD_SIZE, "the ranks' parameters differ"
        buffers = {name: checksum(buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point()}
        return {
            "learning_rate": kind.rate,
            "momentum": kind.momentum,
            "hook": hook,
            "join": join,
            "mixed": mixed,
            "inputs": gathered(first_input),
            "losses": gathered(losses),
            "parameters": [{"name": n, "initial": i, "final": f} for n, i, f in zip(names, initial, final)],
            "buffers": gathered([{"name": name, "final": final} for name, final in buffers.items()]),
        }

    assert torch.__version__.split("+")[0] == TORCH_VERSION, (
        f"torch {TORCH_VERSION} is needed, this is {torch.__version__}"
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models = {
        f"{kind.name}_{hook}" if hook else kind.name: train(kind, hook)
        for kind in (Mlp, LeNet, BatchNorm)
        for hook in HOOKS
    }
    for kind in (Mlp, LeNet, BatchNorm):
        models |= {f"{kind.name}_{name}": train(kind, join=join) for name, join in JOINS.items()}
        models |= {f"{kind.name}_{name}": train(kind, mixed=mixed) for name, mixed in MIXED.items()}
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(models))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # skips Python's finalization, in which gloo's threads now and then abort


def run():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "models.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={WORLD_SIZE}",
            __file__,
            str(path),
        ]
        subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT})
        return json.loads(path.read_text())


def main():
    torch_python.restart()
    models = run()
    if run() != models:
        sys.exit("two runs differ: nothing written")
    result = {
        "torch": TORCH_VERSION,
        "environment": ENVIRONMENT,
        "world_size": WORLD_SIZE,
        "steps": STEPS,
        "batch": BATCH,
        "models": models,
    }
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(result, indent=1) + "\n")


if len(sys.argv) > 1:
    worker(sys.argv[1])
else:
    main()
