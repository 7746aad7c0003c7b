"""Writes tests/data/parity/power_sgd.json: what PyTorch's powerSGD_hook and batched_powerSGD_hook make of a training, in double
precision.

Run as python3 scripts/parity/power_sgd.py: it finds a Python with torch as scripts/torch_python.py says, 2.11.0 if the data are to stay.
It starts itself under torchrun (gloo).

The model, its first values, its inputs and its labels are `batchnorm` of scripts/parity/models.py, whose header describes them, as f64. So
is the training, but for the learning rate and the hook. Each entry of CASES names the hook and the arguments of its PowerSGDState.

Random matrices. PyTorch draws them by its own generator, and Flow by another one. Here torch.randn gives the hook what Flow draws. The
matrix of a parameter in a step (from 0) has numbers from -1 to 1, row by row: of a Mersenne Twister of 32 bits, each divided by 2^32 - 1.
Its seed is the lower half of the 64-bit FNV-1a of "SEED STEP NAME" and a byte 0xff. A batched matrix has the name of the bucket's first
parameter.

Repairs. In PyTorch 2.11 batched_powerSGD_hook ends in an assertion, as its matrices have two dimensions and not three: it gets them with
one more.

The file. `losses[rank][step]` are the ranks' own. `sums` has for each parameter at the end the sum of its elements, each times
value(7, k) of scale 2.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch_python

FILE = Path(__file__).resolve().parent.parent.parent / "tests" / "data" / "parity" / "power_sgd.json"
TORCH_VERSION = "2.11.0"
WORLD_SIZE, STEPS, BATCH, RATE = 2, 20, 8, 0.02
START, SEED = 2, 0
CASES = {
    "rank_1": {"matrix_approximation_rank": 1},
    "rank_2": {"matrix_approximation_rank": 2},
    "rank_4": {"matrix_approximation_rank": 4},
    "all_compressed": {"matrix_approximation_rank": 3, "min_compression_rate": 0.5},
    "without_feedback": {"matrix_approximation_rank": 1, "use_error_feedback": False},
    "cold": {"matrix_approximation_rank": 2, "warm_start": False},
    "batched_rank_1": {"matrix_approximation_rank": 1, "batched": True},
    "batched_rank_4": {"matrix_approximation_rank": 4, "batched": True},
    "batched_cold": {"matrix_approximation_rank": 1, "warm_start": False, "batched": True},
}


def worker(path):
    import numpy
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    from made import BatchNorm, gathered, labels, values

    def digest(text):
        value = 0xCBF29CE484222325
        for byte in [*text.encode(), 0xFF]:
            value = ((value ^ byte) * 0x100000001B3) % 2**64
        return value

    def drawn(name, step, shape):
        twister = numpy.random.MT19937()
        twister._legacy_seeding(digest(f"{SEED} {step} {name}") % 2**32)
        numbers = twister.random_raw(int(numpy.prod(shape))).astype(numpy.float64)
        return torch.from_numpy(numbers / (2**32 - 1) * 2 - 1).reshape(shape)

    orthogonalize = power_sgd._orthogonalize
    power_sgd._orthogonalize = lambda matrices, epsilon=0: orthogonalize(
        matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon
    )

    class Hook:
        """PyTorch's hook, which draws what Flow draws."""

        def __init__(self, model, batched=False, **options):
            self.state = power_sgd.PowerSGDState(None, start_powerSGD_iter=START, random_seed=SEED, **options)
            self.hook = power_sgd.batched_powerSGD_hook if batched else power_sgd.powerSGD_hook
            self.batched = batched
            self.names = {parameter: name for name, parameter in model.named_parameters()}
            self.pending = []

        def __call__(self, _, bucket):
            parameters = bucket.parameters()
            if self.batched:
                self.pending = [self.names[parameters[0]]]
            else:
                self.pending = [self.names[parameter] for parameter in parameters if self.compresses(parameter)]
            randn, torch.randn = torch.randn, self.randn
            try:
                return self.hook(self.state, bucket)
            finally:
                torch.randn = randn

        def compresses(self, parameter):
            rows, columns = parameter.view(parameter.shape[0], -1).shape
            rank = min(rows, columns, self.state.matrix_approximation_rank)
            return power_sgd._should_compress(rows, columns, rank, self.state.min_compression_rate)[0]

        def randn(self, *shape, device, dtype):
            assert dtype == torch.float64
            # Of a batch of one, or of none.
            return drawn(self.pending.pop(0), self.state.iter, shape)

    def train(options):
        model = BatchNorm().double()
        with torch.no_grad():
            for p, (name, parameter) in enumerate(model.named_parameters()):
                scale = BatchNorm.scales.get(name.split(".")[0])
                if scale is not None:
                    parameter.copy_(values(p + 1, tuple(parameter.shape), scale))
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, Hook(model, **options).__call__)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
        losses = []
        for step in range(STEPS):
            salt = 1000 + 4 * step + 2 * dist.get_rank()
            x, y = values(salt, (BATCH, *BatchNorm.input), 2).double(), labels(salt + 1, BATCH)
            optimizer.zero_grad()
            loss = cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        sums = {}
        for name, parameter in model.named_parameters():
            sums[name] = (parameter.detach() * values(7, tuple(parameter.shape), 2).double()).sum().item()
        assert gathered(sums) == [sums] * WORLD_SIZE, "the ranks' parameters differ"
        return {"options": options, "losses": gathered(losses), "sums": sums}

    assert torch.__version__.split("+")[0] == TORCH_VERSION, (
        f"torch {TORCH_VERSION} is needed, this is {torch.__version__}"
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cases = {name: train(options) for name, options in CASES.items()}
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(cases))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # skips Python's finalization, in which gloo's threads now and then abort


def run():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "power_sgd.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORLD_SIZE}"]
        subprocess.run([*launch, __file__, str(path)], check=True)
        return json.loads(path.read_text())


def main():
    torch_python.restart()
    result = {
        "torch": TORCH_VERSION,
        "world_size": WORLD_SIZE,
        "steps": STEPS,
        "batch": BATCH,
        "learning_rate": RATE,
        "start": START,
        "seed": SEED,
        "cases": run(),
    }
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(result, indent=1) + "\n")


if len(sys.argv) > 1:
    worker(sys.argv[1])
else:
    main()
