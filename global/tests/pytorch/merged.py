"""Reads a safetensors file into PyTorch as the format's specification has it, and by its own
library if that is there: both must have the same."""

import json
import struct
import sys

try:
    import torch
except ImportError as error:
    print(error)
    sys.exit(77)

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def load(path):
    """The tensors, by name."""
    with open(path, "rb") as file:
        data = bytearray(file.read())
    (length,) = struct.unpack("<Q", data[:8])
    header, data = json.loads(data[8 : 8 + length]), data[8 + length :]
    assert header.pop("__metadata__") == {"format": "pt"}
    tensors = {}
    for name, info in header.items():
        begin, end = info["data_offsets"]
        tensor = torch.empty(0, dtype=DTYPES[info["dtype"]])
        if begin < end:
            tensor = torch.frombuffer(data[begin:end], dtype=tensor.dtype)
        tensors[name] = tensor.reshape(info["shape"])
    try:
        from safetensors.torch import load_file
    except ImportError:
        remedy = "scripts/setup --python-libraries gets it"
        what = "SKIPPED: a merged checkpoint read by the library safetensors"
        print(f"{what}: {remedy}", file=sys.stderr)
        return tensors
    for name, tensor in load_file(path).items():
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name]), name
    return tensors
