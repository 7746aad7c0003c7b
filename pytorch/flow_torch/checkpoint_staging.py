"""Copies of states that are saved beside the training, in memory that is used again: the kernel has to clear new memory, which takes several
times as long as the copy."""

import torch
from torch.distributed.tensor import DTensor


class Staged(dict):
    """A copy of a state. Unlike a dict it can be referred to weakly, which tells whether a save has it still."""


@torch.no_grad()
def restage(value, before, stage):
    """Copies a value into `before`, which was made of an earlier one, where both are alike; elsewhere by `stage`."""
    if isinstance(value, dict):
        befores = before if isinstance(before, dict) else {}
        return {key: restage(part, befores.get(key), stage) for key, part in value.items()}
    if type(value) in (list, tuple):
        befores = before if type(before) is type(value) and len(before) == len(value) else [None] * len(value)
        return type(value)(restage(part, of_part, stage) for part, of_part in zip(value, befores))
    if not _are_alike(value, before):
        staged = stage(value)
        # PyTorch does not copy a DTensor without dimensions.
        return value.detach().clone() if staged is value and isinstance(value, torch.Tensor) else staged
    _own(before).copy_(_own(value))
    return before


def _are_alike(value, before):
    kinds = torch.Tensor, torch.nn.Parameter, DTensor
    if type(value) not in kinds or type(before) not in kinds or isinstance(value, DTensor) != isinstance(before, DTensor):
        return False
    if isinstance(value, DTensor) and (value.device_mesh, value.placements) != (before.device_mesh, before.placements):
        return False
    own, own_before = _own(value), _own(before)
    is_ours = own_before.is_cpu and not own_before.is_inference()
    return is_ours and (value.shape, own.shape, own.dtype) == (before.shape, own_before.shape, own_before.dtype)


def _own(tensor):
    """This rank's elements."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
