"""With FLOW_TORCH=1, whatever asks for gloo on CPUs gets flow there, and nothing else changes. Two ranks; a line for each case."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flow_torch import replaced

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def name(group, device):
    return type(group._get_backend(device)).__name__


def main():
    cases = {
        "GLOO": lambda: dist.init_process_group("GLOO"),
        "none": lambda: dist.init_process_group(),
        "cpu:gloo": lambda: dist.init_process_group("cpu:gloo"),
        "a mesh": lambda: init_device_mesh("cpu", (2,)),
        "with a GPU": lambda: dist.init_process_group("gloo"),
    }
    for case, init in cases.items():
        torch.cuda.is_available = lambda case=case: case == "with a GPU"
        init()
        group, ones = dist.group.WORLD, torch.ones(1)
        devices = {device.type: name(group, device) for device in (CPU, CUDA) if device in group._device_types}
        pair = dist.new_group([0, 1])
        dist.all_reduce(ones, group=pair)
        if os.environ["RANK"] == "0":
            print(f"{case}: {dist.get_backend()} {dist.get_backend(pair)} {devices} {ones.item():g}", flush=True)
        dist.barrier()
        dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        for backend in ("cpu:gloo,cuda:nccl", "nccl", "cuda:nccl"):
            print(f"{backend}: {replaced._with_flow(backend)}")


if __name__ == "__main__":
    main()
