"""Values, labels and a model that scripts/parity/models.py and power_sgd.py train with: the header of models.py describes them."""

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import relu


class BatchNorm(nn.Module):
    name, input, rate, momentum = "batchnorm", (3, 16, 16), 0.05, 0.0
    scales = {"conv1": 2**-1, "conv2": 2**-2, "fc": 2**-1}

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        x = relu(self.bn1(self.conv1(x)))
        x = relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


def hashes(salt, shape):
    k = numpy.arange(numpy.prod(shape), dtype=numpy.uint32)
    h = k * numpy.uint32(2654435761) + numpy.uint32(salt)
    h = (h ^ (h >> numpy.uint32(16))) * numpy.uint32(0x85EBCA6B)
    h = (h ^ (h >> numpy.uint32(13))) * numpy.uint32(0xC2B2AE35)
    return (h ^ (h >> numpy.uint32(16))).reshape(shape)


def values(salt, shape, scale):
    fractions = (hashes(salt, shape) >> numpy.uint32(8)).astype(numpy.float32) / numpy.float32(2**24)
    return torch.from_numpy((fractions - numpy.float32(0.5)) * numpy.float32(scale))


def labels(salt, count):
    return torch.from_numpy((hashes(salt, (count,)) % 10).astype(numpy.int64))


def gathered(value):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return parts
