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
    return {key: (True, value.state_dict()) if is_stateful(value) else (False, value) for key, value in state.items()}


def load_state(state, values):
    """Makes the state what it was when `state_of` returned these values."""
    if not isinstance(state, dict):
        return state.load_state_dict(values)
    for key in state.keys() - values.keys():
        del state[key]
    for key, (is_of_object, value) in values.items():
        if not is_of_object:
            state[key] = value
        elif is_stateful(state.get(key)):
            state[key].load_state_dict(value)
        else:
            raise RuntimeError(f"flow: there is no object in the state at {key!r} to load into: have it there from the begin to the end")


def is_stateful(value):
    """Whether the value says itself what is kept of it."""
    return not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def modules_of(model):
    """What is kept and sent of the modules beside their tensors: whether they train, and the extra state."""
    extra = [module.get_extra_state() for module in _modules_with_extra_state(model)]
    return [module.training for module in model.modules()], extra


def load_modules(model, values):
    """Makes the modules what they were when `modules_of` returned these values."""
    trainings, extra = values
    for module, is_training in zip(model.modules(), trainings):
        module.training = is_training
    for module, value in zip(_modules_with_extra_state(model), extra):
        module.set_extra_state(value)


def _modules_with_extra_state(model):
    return [module for module in model.modules() if type(module).get_extra_state is not torch.nn.Module.get_extra_state]


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
        "modules": modules_of(model),
        "optimizer": optimizer.state_dict(),
        "random_numbers": torch.get_rng_state(),
        "state": state_of(state),
    }


def _take(values, model, optimizer, state):
    _load_optimizer(optimizer, values["optimizer"])
    load_modules(model, values["modules"])
    load_state(state, values["state"])
    with torch.no_grad():
        for name, tensor in _tensors_of(model).items():
            tensor.copy_(values["tensors"][name])
    for parameter, requires_grad in zip(model.parameters(), values["requires_grad"]):
        parameter.requires_grad_(requires_grad)
    torch.set_rng_state(values["random_numbers"])


def _load_optimizer(optimizer, values):
    optimizer.load_state_dict(values)
    # That casts to the parameters' type.
    for group, own in zip(values["param_groups"], optimizer.param_groups):
        for index, parameter in zip(group["params"], own["params"]):
            if index in values["state"]:
                optimizer.state[parameter] = values["state"][index]


def copy_of(values):
    """Bytes for pickle.loads. Raises TypeError for what cannot be sent."""
    file = io.BytesIO()
    try:
        _Copier(file).dump(values)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(f"flow: the state cannot be sent: {error}") from error
    return file.getvalue()


class _Copier(pickle.Pickler):
    """Refuses what would be loaded as another object."""

    def reducer_override(self, value):
        if is_stateful(value):
            raise TypeError(f"there is {type(value).__name__} in a value: put it at the top of the state")
        return NotImplemented


class _Pickler(_Copier):
    """Leaves tensors out: they are sent apart, and not copied."""

    def __init__(self, file):
        super().__init__(file)
        self.tensors = []

    def persistent_id(self, value):
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return None
        self.tensors.append(value.detach().contiguous())
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
