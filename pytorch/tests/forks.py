"""What could go wrong with shared memory and threads: fork, DataLoader workers, numpy, torch.save, freeing, exit. Two ranks."""

import gc
import io
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import flow_torch

failures = 0


def check(what, good):
    global failures
    failures += not good
    print(f"{what}: {'good' if good else 'BAD'}", flush=True)


def child(queue, net):
    own = torch.full((100_000,), 7.0)
    try:
        dist.all_reduce(own)
        error = ""
    except Exception as raised:
        error = str(raised)
    queue.put((own.sum().item(), sum(p.numel() for p in net.parameters()), error))


def shared_mib():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss_Shmem")) >> 10


def main():
    torch.set_num_threads(1)
    dist.init_process_group("flow")
    rank = dist.get_rank()
    net = DistributedDataParallel(nn.Linear(400, 400), gradient_as_bucket_view=True)
    data = TensorDataset(torch.arange(64 * 400.0).view(64, 400))
    for epoch in range(2):
        for index, (batch,) in enumerate(DataLoader(data, batch_size=16, num_workers=2)):
            if not torch.equal(batch, data.tensors[0][16 * index : 16 * index + 16]):
                check("batches of workers", False)
            net.zero_grad()
            net(batch).sum().backward()
    sums = [None, None]
    dist.all_gather_object(sums, net.module.weight.grad.sum().item())
    check("gradients between workers", sums[0] == sums[1])

    dist.all_reduce(torch.ones(100_000), async_op=True).wait()  # there is a helper thread
    queue = mp.get_context("fork").SimpleQueue()
    process = mp.get_context("fork").Process(target=child, args=(queue, net))
    process.start()
    total, count, error = queue.get()
    process.join()
    check("a forked process", total == 700_000 and count == 160_400 and process.exitcode == 0)
    check("its collectives", "was forked from rank" in error)
    forked = os.fork()
    if forked == 0:
        dist.destroy_process_group()
        sys.exit(0)
    _, status = os.waitpid(forked, 0)
    one = torch.ones(5)
    dist.all_reduce(one)
    check("the group, after a forked process has left it", status == 0 and one[0] == 2)

    gradient = net.module.weight.grad
    array, buffer = gradient.numpy(), io.BytesIO()
    torch.save(gradient, buffer)
    buffer.seek(0)
    check("numpy, torch.save", torch.equal(torch.load(buffer), gradient) and array[3, 4] == gradient[3, 4].item())
    copy = gradient.detach().clone().share_memory_()
    check("share_memory_", copy.is_shared() and torch.equal(copy, gradient))

    used = []
    for _ in range(3):
        big = DistributedDataParallel(nn.Linear(3000, 3000), gradient_as_bucket_view=True)
        big(torch.ones(1, 3000)).sum().backward()
        kept = big.module.weight.grad
        used.append(shared_mib())
        del big
        gc.collect()
    check("memory of models that are gone serves the next", used[0] >= 34 and used[2] <= used[0] + 40)
    dist.destroy_process_group()
    check("a gradient, after its group was destroyed", bool((kept == kept[0, 0]).all()))
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
