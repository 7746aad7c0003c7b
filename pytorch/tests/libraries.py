"""Trains by a library that asks for gloo. Each rank prints the backend, and the weights. usage: libraries.py accelerate|lightning|fabric"""

import os
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

ROWS = torch.arange(64.0).sin().view(16, 4)


def loader():
    return DataLoader(TensorDataset(ROWS, ROWS.sum(1, keepdim=True)), batch_size=4)


def loss(net, batch):
    return torch.nn.functional.mse_loss(net(batch[0]), batch[1])


def accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(4, 1)
    wrapped, optimizer, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader())
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(loss(wrapped, batch))
        optimizer.step()
    assert accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == [0, 1]
    return net


def lightning():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch):
            return loss(self.net, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet).fit(module, loader())
    return module.net


def fabric():
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    net = torch.nn.Linear(4, 1)
    wrapped, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for batch in fabric.setup_dataloaders(loader()):
        optimizer.zero_grad()
        fabric.backward(loss(wrapped, batch))
        optimizer.step()
    return net


def main():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = {"accelerate": accelerate, "lightning": lightning, "fabric": fabric}[sys.argv[1]]()
    # One write for a line.
    os.write(1, f"result: {dist.get_backend()} {[weight.hex() for weight in net.weight[0].tolist()]}\n".encode())


if __name__ == "__main__":
    main()
