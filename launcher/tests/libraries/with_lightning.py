"""Trains with Lightning's Trainer, then with Fabric; both find the ranks that a launcher has set."""

import lightning
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

from result import end, tell


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader():
    return DataLoader(TensorDataset(torch.arange(64.0).sin().view(16, 4)), batch_size=4)


def tell_of(name, strategy, model):
    environment = type(strategy.cluster_environment).__name__
    weights = " ".join(f"{weight:.4f}" for weight in model.layer.weight[0])
    tell(f"rank {strategy.global_rank} of {strategy.world_size}, {name}, {environment}: {weights}")


def main():
    lightning.seed_everything(1)
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet)
    model = Model()
    trainer.fit(model, loader())
    tell_of("trainer", trainer.strategy, model)

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = Model()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped.mark_forward_method("training_step")
    for batch in fabric.setup_dataloaders(loader()):
        optimizer.zero_grad()
        fabric.backward(wrapped.training_step(batch))
        optimizer.step()
    tell_of("fabric", fabric.strategy, model)


if __name__ == "__main__":
    main()
    end()
