"""torch.distributed makes real numbers of a program's complex ones, and hands these to the backend. But what ranks compare, and what errors
name, is what the program has called.
"""

import inspect
import types

import torch
import torch.distributed as dist


def install():
    """Has torch.distributed note it where it makes real numbers: its functions call `torch.flow_view_as_real` in place of
    `torch.view_as_real`. They stay the objects by which PyTorch's compiler knows them, and take no longer for other types."""
    torch.flow_view_as_real = _view_as_real
    # Not by isinstance, at which PyTorch's deprecated names warn.
    functions = [value for value in vars(dist.distributed_c10d).values() if type(value) is types.FunctionType]
    for function in map(inspect.unwrap, functions):
        if function.__module__ == dist.distributed_c10d.__name__:
            code = _with_name_replaced(function.__code__)
            if code != function.__code__:
                function.__code__ = code


def called_type(tensor):
    """The type of the tensor that a program has called an operation with, of which torch.distributed has made this one."""
    return getattr(tensor, "flow_called_type", tensor.dtype)


def _view_as_real(tensor):
    view = torch.view_as_real(tensor)
    view.flow_called_type = tensor.dtype  # csrc/called_type.h looks at it, too
    return view


def _with_name_replaced(code):
    names = tuple("flow_view_as_real" if name == "view_as_real" else name for name in code.co_names)
    # Comprehensions have code of their own.
    constants = tuple(_with_name_replaced(value) if isinstance(value, types.CodeType) else value for value in code.co_consts)
    return code.replace(co_names=names, co_consts=constants)
