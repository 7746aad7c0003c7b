"""A classifier in PyTorch, on ranks that come and go.

    flow-launch --nproc-per-node 3 --elastic in-place --max-restarts 100 examples/elastic.py --epochs 50

Kill some of its processes: each epoch still takes each sample once. The samples of a step are the same whatever the number of ranks.
"""

import argparse
import functools

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import flow_torch

SAMPLES, BATCH = 4096, 96


@functools.cache
def data():
    generator = torch.Generator().manual_seed(0)
    images, teacher = torch.randn(SAMPLES, 64, generator=generator), torch.randn(64, 10, generator=generator)
    return images, (images @ teacher).argmax(1)


@functools.lru_cache(1)
def order(epoch):
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--save", metavar="FILE", help="file for the trained weights")
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels = data()
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    # All that the program knows of its progress.
    state = {"epoch": 0, "begin": 0, "loss": 0.0, "counts": torch.zeros(SAMPLES), "scheduler": scheduler}
    with flow_torch.Elastic(model, optimizer, state) as elastic:
        while state["epoch"] < options.epochs:
            with elastic.step():
                batch = order(state["epoch"])[state["begin"] : state["begin"] + BATCH]
                own = batch[dist.get_rank() :: dist.get_world_size()]
                loss = cross_entropy(elastic.model(images[own]), labels[own], reduction="sum")
                # Gradients are the mean over the ranks.
                (loss * dist.get_world_size() / len(batch)).backward()
                counts = torch.zeros(SAMPLES)
                counts[own] = 1
                total = loss.detach()
                dist.all_reduce(counts)
                dist.all_reduce(total)
                optimizer.step()  # nothing after it communicates
                state["begin"] += len(batch)
                state["loss"] += total.item()
                state["counts"] += counts
                if state["begin"] == SAMPLES:
                    end_epoch(state)
    if options.save and dist.get_rank() == 0:
        torch.save(model.state_dict(), options.save)
    dist.destroy_process_group()


def end_epoch(state):
    if dist.get_rank() == 0:
        once, loss = (state["counts"] == 1).sum(), state["loss"] / SAMPLES
        print(f"epoch {state['epoch']}: {once} samples once, loss {loss:.3f}, {dist.get_world_size()} ranks", flush=True)
    state.update(epoch=state["epoch"] + 1, begin=0, loss=0.0, counts=torch.zeros(SAMPLES))
    state["scheduler"].step()


if __name__ == "__main__":
    main()
