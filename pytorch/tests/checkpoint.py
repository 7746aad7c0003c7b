"""DistributedCheckpoint over flow: what a model of FSDP2 and its optimizer save, another one loads. Two ranks. usage: checkpoint.py FOLDER"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flow_torch


def model(seed, mesh):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 3))
    fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def step(net, optimizer):
    optimizer.zero_grad()
    net(torch.full((4, 40), dist.get_rank() + 1.0)).square().mean().backward()
    optimizer.step()
    return torch.cat([parameter.full_tensor().detach().flatten() for parameter in net.parameters()])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("flow")
    mesh = init_device_mesh("cpu", (2,))
    first, second = model(1, mesh), model(2, mesh)
    for _ in range(3):
        step(*first)
    for save in dcp.save, dcp.async_save:
        folder = f"{sys.argv[1]}/{save.__name__}"
        state = dict(zip(("model", "optimizer"), get_state_dict(*first)))
        saved = save(state, checkpoint_id=folder)
        if save is dcp.async_save:
            saved.result()
        loaded = dict(zip(("model", "optimizer"), get_state_dict(*second)))
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(*second, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        same = torch.equal(step(*first), step(*second))
        print(f"{save.__name__}: {'same bits' if same else 'different'}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
