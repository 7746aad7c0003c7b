"""Small data for the programs of strangers_programs.py, made from seeds: each function puts it where a program looks for it."""

import gzip
import json
import pickle
import random
import shutil
import struct

import numpy
import torch

WORDS = "rank bucket tensor node core store ring tree shard layer head step loss batch token graph queue lock page flow".split()


def tokens(folder):
    """nanoGPT's: a made language of 64 tokens, in which each token has four that may follow."""
    made = folder / "data" / "made"
    made.mkdir(parents=True)
    draw = random.Random(1)
    following = [draw.choices(range(64), k=4) for _ in range(64)]
    for name, count in (("train", 100_000), ("val", 10_000)):
        text = [0]
        while len(text) < count:
            text.append(draw.choice(following[text[-1]]))
        numpy.array(text, dtype=numpy.uint16).tofile(made / f"{name}.bin")
    (made / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64}))


def images(count, classes, shape, seed):
    """Noise on a pattern of its class, as bytes, and the classes."""
    draw = torch.Generator().manual_seed(seed)
    patterns = torch.rand(classes, *shape, generator=torch.Generator().manual_seed(0)) * 128
    labels = torch.randint(classes, (count,), generator=draw)
    return (patterns[labels] + torch.rand(count, *shape, generator=draw) * 127).to(torch.uint8), labels


def image_folders(folder):
    from PIL import Image

    for seed, (name, count) in enumerate([("train", 128), ("val", 16)], 1):
        pictures, labels = images(count, 4, (64, 64, 3), seed)
        for number, (picture, label) in enumerate(zip(pictures, labels)):
            path = folder / "made" / name / f"class{label}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture.numpy()).resize((256, 256)).save(path)


def fashion_mnist(folder):
    """The files of torchvision's FashionMNIST, unpacked and packed."""
    raw = folder.parent / "data" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for seed, (name, count) in enumerate([("train", 12_800), ("t10k", 2_000)], 1):
        pictures, labels = images(count, 10, (28, 28), seed)
        for file, header, values in (
            (f"{name}-images-idx3-ubyte", struct.pack(">IIII", 2051, count, 28, 28), pictures),
            (f"{name}-labels-idx1-ubyte", struct.pack(">II", 2049, count), labels.to(torch.uint8)),
        ):
            content = header + values.numpy().tobytes()
            (raw / file).write_bytes(content)
            (raw / f"{file}.gz").write_bytes(gzip.compress(content, 1))


def lightning_mnist(folder):
    complete = folder.parent.parent / "Datasets" / "MNIST" / "complete"
    complete.mkdir(parents=True)
    for seed, (name, count) in enumerate([("training", 60_000), ("test", 10_000)], 1):
        torch.save(images(count, 10, (28, 28), seed), complete / f"{name}.pt")


def sentence(draw):
    return " ".join(draw.choices(WORDS, k=draw.randint(5, 20)))


def tokenizer(folder, **special):
    """Of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*special.values(), *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=128, **special)
    made.save_pretrained(folder)
    return made


def language_model(folder):
    """A Llama at random with its tokenizer, and lines of text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made = tokenizer(folder / "model", unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=128, pad_token_id=made.pad_token_id, bos_token_id=made.bos_token_id, eos_token_id=made.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    draw = random.Random(1)
    (folder / "text").mkdir()
    (folder / "text" / "train.jsonl").write_text("".join(json.dumps({"text": sentence(draw)}) + "\n" for _ in range(400)))


def sentence_pairs(folder):
    """A small BERT at random, pairs of sentences in the place of GLUE's MRPC, and the metric where `evaluate.load("glue")` looks for it."""
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer(folder / "bert-base-cased", unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    torch.manual_seed(1)
    # Large weights, so that its answers are not all the same.
    config = BertConfig(
        vocab_size=64, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, pad_token_id=1, initializer_range=0.3
    )
    BertForSequenceClassification(config).save_pretrained(folder / "bert-base-cased")
    glue = folder / "nyu-mll" / "glue"
    (glue / "mrpc").mkdir(parents=True)
    draw = random.Random(1)
    for name, count in (("train", 640), ("validation", 256)):
        pairs = ({"sentence1": sentence(draw), "sentence2": sentence(draw), "label": draw.randint(0, 1), "idx": row} for row in range(count))
        (glue / "mrpc" / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    files = "".join(f"  - split: {name}\n    path: mrpc/{name}.jsonl\n" for name in ("train", "validation"))
    (glue / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")
    shutil.copytree(folder.parent / "metrics" / "glue", folder / "glue")
