"""The training of examples/tests/it/gpt.rs by torch.nn: prints its losses, and how far gradients and weights differ.

usage: reference.py CHECKPOINTS TEXT < PLACES     a line for each step: where its samples begin, as a list
"""

import json
import struct
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

LAYERS, WIDTH, HEADS, CONTEXT, LR, CLIP = 8, 16, 8, 8, 0.02, 0.5


def read(path):
    """The tensors of a safetensors file."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    types = {"F64": torch.float64, "I64": torch.int64}

    def tensor(info):
        start, end = (8 + size + offset for offset in info["data_offsets"])
        return torch.frombuffer(bytearray(data[start:end]), dtype=types[info["dtype"]]).reshape(info["shape"])

    head = json.loads(data[8 : 8 + size])
    return {name: tensor(info) for name, info in head.items() if name != "__metadata__"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        # Of each head the query, the key and the value.
        heads = self.qkv(self.norm1(x)).unflatten(-1, (HEADS, 3, WIDTH // HEADS))
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential()
        self.head.norm = nn.LayerNorm(WIDTH)
        self.head.logits = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens):
        return self.head(self.blocks(self.tokens(tokens) + self.positions.weight))


def in_order(parameters):
    """The names of the parameters as Flow counts them: of a linear layer the bias first."""
    blocks = [f"blocks.{number}.{{}}" for number in range(LAYERS)]
    norms, linears = ("norm1", "norm2"), ("qkv", "projection", "up", "down")
    of_block = [f"{norm}.{part}" for norm in norms for part in ("weight", "bias")]
    of_block += [f"{linear}.{part}" for linear in linears for part in ("bias", "weight")]
    names = ["tokens.weight", "positions.weight", *(block.format(name) for block in blocks for name in of_block)]
    names += ["head.norm.weight", "head.norm.bias", "head.logits.weight"]
    assert sorted(names) == sorted(parameters)
    return names


def main():
    folder, text = Path(sys.argv[1]), torch.tensor(list(Path(sys.argv[2]).read_bytes()))
    places = [json.loads(line) for line in sys.stdin]

    def saved(step):
        return read(folder / f"step-{step}" / "rank-00000.safetensors")

    def weights(tensors):
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}

    model = Gpt().double()
    model.load_state_dict(weights(saved(0)))
    optimizer = torch.optim.AdamW(model.parameters(), LR, betas=(0.9, 0.99), weight_decay=0.1)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(places), eta_min=0.1 * LR)
    losses = []
    for starts in places:
        pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        rates.step()
        losses.append(loss.item())

    flow, parameters = saved(len(places)), dict(model.named_parameters())
    means = {name: flow[f"optimizer.{number}.exp_avg"] for number, name in enumerate(in_order(parameters))}

    def furthest(found, expected):
        return max((found[name] - expected[name]).abs().max().item() for name in parameters)

    expected_means = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in parameters.items()}
    with torch.no_grad():
        differences = {"gradients": furthest(means, expected_means), "weights": furthest(weights(flow), parameters)}
    print(json.dumps({"losses": losses, **differences}))


if __name__ == "__main__":
    main()
