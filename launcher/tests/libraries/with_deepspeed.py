"""Trains with DeepSpeed's ZeRO on CPUs."""

import os

import deepspeed
import torch

from result import end, tell

# It would compile this one, for which there must be a compiler and torch's headers.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(2):
    inputs = torch.arange(16.0).view(4, 4).sin() + engine.global_rank + step
    engine.backward(engine(inputs).square().mean())
    engine.step()
weights = " ".join(f"{weight:.4f}" for weight in engine.module.weight[0])
tell(f"rank {engine.global_rank} of {engine.world_size}, local rank {os.environ['LOCAL_RANK']}: {weights}")
deepspeed.comm.destroy_process_group()
end()
