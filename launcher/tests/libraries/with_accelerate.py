"""Trains with Accelerator."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from result import end, tell

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
inputs = torch.randn(16, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, targets in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()

weights = " ".join(f"{weight:.4f}" for weight in accelerator.unwrap_model(model).weight[0])
steps = accelerator.gather(torch.tensor([len(loader)])).tolist()
tell(f"rank {accelerator.process_index} of {accelerator.num_processes}: {weights} {steps}")
accelerator.end_training()
end()
