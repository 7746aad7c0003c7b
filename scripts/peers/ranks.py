"""How the ranks of these programs come together, and go."""

import os
import sys

import torch
import torch.distributed as dist


def join(kind, share_gpus=False):
    """Joins the ranks that torchrun has started; returns this rank's device.

    `share_gpus`: as many ranks as there are on the machine's GPUs. NCCL refuses two ranks on one GPU unless they look
    like two hosts.
    """
    torch.set_num_threads(1)
    if kind == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    if share_gpus:
        os.environ["NCCL_HOSTID"] = f"rank-{os.environ['RANK']}"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def leave():
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # skips Python's finalization, in which gloo's threads now and then abort
