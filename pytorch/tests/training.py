"""DDP, FSDP2 and DTensor train to the same bits over flow and over gloo. Rank 0 prints a line for each case."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import flow_torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "peers"))
from models import MODELS


def model():
    torch.manual_seed(1)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(300, 300), nn.ReLU())), nn.Linear(300, 10))


def train(net, steps=5, batch=lambda: (torch.randn(16, 300), torch.randint(0, 10, (16,)))):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        x, y = batch()
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def ddp(**options):
    return lambda group: train(DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.5, **options))


def of_bench(name):
    def case(group):
        torch.manual_seed(0)
        net, shape = MODELS[name]()
        net = DistributedDataParallel(net, process_group=group)
        return train(net, steps=2, batch=lambda: (torch.randn(shape), torch.randint(0, 10, shape[:1])))

    return case


def fsdp2(group):
    mesh, net = DeviceMesh.from_group(group, "cpu"), model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    if group is dist.group.WORLD:
        for part in net.modules():
            if hasattr(part, "set_allocate_memory_from_process_group_for_comm"):
                part.set_allocate_memory_from_process_group_for_comm(True)
    return train(net)


def tensor_parallel(group):
    net = parallelize_module(model(), DeviceMesh.from_group(group, "cpu"), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.manual_seed(5)
    out = net(torch.randn(16, 300))
    out.sum().backward()
    return out.detach()


def redistribute(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(3)
    tensor = distribute_tensor(torch.randn(9, 7), mesh, [Shard(0)])
    return torch.cat([tensor.redistribute(mesh, [kind]).full_tensor().flatten() for kind in (Shard(1), Replicate())])


def buckets_are_shared():
    """Whether DDP's buckets lie in shared memory, as a view of them tells that Python sees after a backward."""
    net = DistributedDataParallel(nn.Linear(300, 300), gradient_as_bucket_view=True)
    for _ in range(2):
        net(torch.randn(4, 300)).sum().backward()
    return flow_torch.is_shared(net.module.weight.grad)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("flow")
    groups, failures = (dist.group.WORLD, dist.new_group(backend="gloo")), 0
    cases = {
        "ddp": ddp(),
        "ddp, gradients are views of buckets": ddp(gradient_as_bucket_view=True),
        "ddp, static graph": ddp(static_graph=True),
        "ddp, unused parameters": ddp(find_unused_parameters=True),
        **{f"ddp, {name}": of_bench(name) for name in ("mlp", "lenet", "wide", "mobilenet")},
        "fully_shard": fsdp2,
        "tensor parallel": tensor_parallel,
        "redistribute": redistribute,
    }
    for name, case in cases.items():
        ours, theirs = (case(group) for group in groups)
        same = torch.equal(ours, theirs)
        failures += not same
        if not same or dist.get_rank() == 0:
            print(f"{name}: {'same bits' if same else (ours - theirs).abs().max().item()}", flush=True)
    failures += not buckets_are_shared()
    dist.destroy_process_group()
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
