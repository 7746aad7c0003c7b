"""Trains a small model with transformers' Trainer, from nothing but its configuration."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from result import end, tell

torch.manual_seed(0)
sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
samples = [{"input_ids": torch.arange(i, i + 8) % 16, "labels": torch.arange(i, i + 8) % 16} for i in range(16)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=samples)
    loss = trainer.train().training_loss
    total = trainer.accelerator.reduce(torch.tensor(arguments.process_index + 1.0)).item()
    tell(f"rank {arguments.process_index} of {arguments.world_size}: {loss:.4f} {total}")
end()
