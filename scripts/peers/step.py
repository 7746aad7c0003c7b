"""PyTorch's side of `flow-bench step`: median step times without and with DistributedDataParallel, as JSON lines.

A step is zero_grad, forward, backward, SGD; the input is fixed. Both ranks run the local model at the same time, so
that it has the same share of the memory's bandwidth. Blocks of local and distributed steps alternate.

usage: torchrun --nproc_per_node R step.py mlp|lenet|wide|mobilenet...
"""

import copy
import json
import os
import statistics
import sys
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BLOCKS = 5
SECONDS_PER_BLOCK = 0.5


def mlp():
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)), (50, 784)


def lenet():
    layers = [nn.Conv2d(1, 32, 5, padding=2), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 64, 5, padding=2), nn.MaxPool2d(2), nn.Flatten()]
    layers += [nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), (50, 1, 28, 28)


def wide():
    layers = []
    for _ in range(6):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, 10)), (32, 2048)


def conv_bn_relu6(inputs, outputs, size, stride=1, groups=1):
    conv = nn.Conv2d(inputs, outputs, size, stride, (size - 1) // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU6()]


class InvertedResidual(nn.Module):
    def __init__(self, inputs, outputs, stride, expansion):
        super().__init__()
        hidden = inputs * expansion
        layers = conv_bn_relu6(inputs, hidden, 1) if expansion != 1 else []
        layers += conv_bn_relu6(hidden, hidden, 3, stride, groups=hidden)
        layers += [nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.layers(x) if self.residual else self.layers(x)


def mobilenet():
    """MobileNetV2 (Sandler et al. 2018), width 1."""
    layers, channels = conv_bn_relu6(3, 32, 3, stride=2), 32
    settings = [
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ]
    for expansion, outputs, repeats, stride in settings:
        for i in range(repeats):
            layers.append(InvertedResidual(channels, outputs, stride if i == 0 else 1, expansion))
            channels = outputs
    layers += conv_bn_relu6(channels, 1280, 1)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, 10)]
    return nn.Sequential(*layers), (32, 3, 32, 32)


def stepper(model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)  # all models stay alike: times depend on values
    loss_function = nn.CrossEntropyLoss()

    def step():
        start = perf_counter()
        optimizer.zero_grad()
        loss_function(model(x), y).backward()
        optimizer.step()
        return perf_counter() - start

    return step


MODELS = {"mlp": mlp, "lenet": lenet, "wide": wide, "mobilenet": mobilenet}


def bench(name):
    torch.manual_seed(0)
    model, shape = MODELS[name]()
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(shape), torch.randint(0, 10, shape[:1])
    local = stepper(model, x, y)
    distributed = stepper(DistributedDataParallel(copy.deepcopy(model)), x, y)

    warm_up = statistics.median(distributed() for _ in range(5))
    count = torch.tensor([max(5, min(500, int(SECONDS_PER_BLOCK / warm_up)))])
    dist.broadcast(count, 0)
    times = {local: [], distributed: []}
    for _ in range(BLOCKS):
        for step in (local, distributed):
            dist.barrier()
            step()
            times[step] += [step() for _ in range(count.item())]
    local_ms, ddp_ms = (statistics.median(times[step]) * 1e3 for step in (local, distributed))
    if dist.get_rank() == 0:
        line = {"bench": "step", "model": name, "local_ms": local_ms, "ddp_ms": ddp_ms, "efficiency": local_ms / ddp_ms}
        print(json.dumps(line), flush=True)


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        bench(name)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # skips Python's finalization, in which gloo's threads now and then abort


main()
