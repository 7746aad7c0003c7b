"""Tensor-parallel inference by transformers: a Llama made at random, `tp_plan="auto"`. usage: generate.py make|run FOLDER [TOKENS]

`make` saves the model in FOLDER. `run` loads it, on as many ranks as there are, and generates TOKENS tokens (64) for one prompt, then for
eight at once, three times each. Rank 0 prints a line of JSON: the tokens a second of the fastest time, of all prompts, and the tokens.
"""

import json
import os
import sys
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

PROMPT = 32
VOCABULARY = 8192


def make(folder):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=512, bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def run(folder, tokens):
    parallel = {"tp_plan": "auto"} if int(os.environ.get("WORLD_SIZE", 1)) > 1 else {}
    model = AutoModelForCausalLM.from_pretrained(folder, **parallel).eval()
    rates, made = {}, {}
    for prompts in (1, 8):
        prompt = torch.randint(1, VOCABULARY, (prompts, PROMPT), generator=torch.Generator().manual_seed(2))
        seconds = []
        for _ in range(4):
            start = perf_counter()
            output = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
            )
            seconds.append(perf_counter() - start)
        rates[prompts] = prompts * tokens / min(seconds[1:])
        made[prompts] = output[:, PROMPT:].tolist()
    if int(os.environ.get("RANK", 0)) == 0:
        # One write for a line.
        os.write(1, (json.dumps({"rates": rates, "tokens": made}) + "\n").encode())
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2])
    else:
        run(sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 64)
