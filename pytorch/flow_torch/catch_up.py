"""All ranks take what the rank has that has done most steps."""

import hashlib
import io
import os
import pickle

import torch
import torch.distributed as dist


def catch_up(steps, model, optimizer, state):
    """Gives ranks that are behind what the rank has that is farthest: the model's tensors, the optimizer's state and the program's. `steps`:
    how many this rank has done; -1: none, it has just come. Returns how many the farthest has done. If this fails, the rank has what it had
    before: the next ranks may need it.

    Raises RuntimeError where no rank has weights, and on a rank whose model or optimizer is another one.
    """
    own, size = dist.get_rank(), dist.get_world_size()
    table = torch.empty(size, 2, dtype=torch.int64)
    dist.all_gather_into_tensor(table, torch.tensor([[steps, _digest(model, optimizer)]]))
    done, digests = table.T.tolist()
    most = max(done)
    source = done.index(most)
    if most < 0:
        raise RuntimeError(f"flow: rank {os.environ['RANK']}: nobody is left who has weights: start the job again, from a checkpoint")
    if digests[own] != digests[source]:
        raise RuntimeError(f"flow: rank {os.environ['RANK']} has another model or optimizer than the ranks that have weights")
    if min(done) == most:
        return most
    if own == source:
        given, tensors = _pack(_all_of(model, optimizer, state))
        _broadcast_bytes(given, source)
    else:
        values, tensors = _unpack(_broadcast_bytes(b"", source))
    for tensor in tensors:
        dist.broadcast(tensor, source)
    if steps < most:
        _take(values, model, optimizer, state)
    return most


def state_of(state):
    """What is kept and sent of the program's state: a dictionary's values, or what `state_dict()` returns."""
    if not isinstance(state, dict):
        return state.state_dict()
    return {key: value.state_dict() if is_stateful(value) else value for key, value in state.items()}


def load_state(state, values):
    """Makes the state what it was when `state_of` returned these values."""
    if not isinstance(state, dict):
        return state.load_state_dict(values)
    for key in state.keys() - values.keys():
        del state[key]
    for key, value in values.items():
        own = state.get(key)
        if isinstance(own, torch.amp.GradScaler) and own.is_enabled():
            # Its state_dict() leaves out whose gradients are unscaled already.
            own.scale(torch.zeros(1))
            own.update(value["scale"])
        if is_stateful(own):
            own.load_state_dict(value)
        else:
            state[key] = value


def is_stateful(value):
    """Whether the value says itself what is kept of it."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _tensors_of(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _digest(model, optimizer):
    lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in _tensors_of(model).items()]
    lines += [f"{type(optimizer).__name__} {[len(group['params']) for group in optimizer.param_groups]}"]
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "little")


def _all_of(model, optimizer, state):
    return {
        "tensors": {name: tensor.detach() for name, tensor in _tensors_of(model).items()},
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "optimizer": optimizer.state_dict(),
        "state": state_of(state),
    }


def _take(values, model, optimizer, state):
    optimizer.load_state_dict(values["optimizer"])
    load_state(state, values["state"])
    with torch.no_grad():
        for name, tensor in _tensors_of(model).items():
            tensor.copy_(values["tensors"][name])
    for parameter, requires_grad in zip(model.parameters(), values["requires_grad"]):
        parameter.requires_grad_(requires_grad)


class _Pickler(pickle.Pickler):
    """Leaves tensors out: they are sent apart, and not copied."""

    def __init__(self, file):
        super().__init__(file)
        self.tensors = []

    def persistent_id(self, value):
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return None
        self.tensors.append(value)
        return value.shape, value.dtype, value.device.type


class _Unpickler(pickle.Unpickler):
    """Has memory in the places of tensors, whose values are still to come."""

    def __init__(self, file):
        super().__init__(file)
        self.tensors = []

    def persistent_load(self, left_out):
        shape, dtype, device = left_out
        self.tensors.append(torch.empty(shape, dtype=dtype, device=device))
        return self.tensors[-1]


def _pack(values):
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(values)
    return file.getvalue(), pickler.tensors


def _unpack(data):
    unpickler = _Unpickler(io.BytesIO(data))
    return unpickler.load(), unpickler.tensors


def _broadcast_bytes(data, source):
    length = torch.tensor([len(data)])
    dist.broadcast(length, source)
    taken = bytearray(data) if dist.get_rank() == source else bytearray(length.item())
    dist.broadcast(torch.frombuffer(taken, dtype=torch.uint8), source)
    return taken
