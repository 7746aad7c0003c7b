"""DistributedDataParallel's mixed precision, on CPUs: forward and backward in half precision, say, and parameters that stay what they are."""

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import _find_tensors


class MixedPrecision:
    """The types of a `_MixedPrecision`, for a module. What is None stays what it is; without `reduce` it is `param`."""

    def __init__(self, config, module):
        self.param, self.buffer = config.param_dtype, config.buffer_dtype
        self.reduce = config.reduce_dtype or config.param_dtype
        for name in "param_dtype", "reduce_dtype", "buffer_dtype":
            dtype = getattr(config, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"mixed_precision: {name} is a floating-point type, torch.bfloat16 say, and not {dtype}")
        for name, parameter in module.named_parameters():
            if not (parameter.is_floating_point() or _is_ignored(parameter)):
                raise ValueError(f"mixed_precision: parameters are real floating-point numbers, and {name} is {parameter.dtype}")

    def cast_buffers(self, module):
        for buffer in module.buffers():
            if self.buffer is not None and buffer.is_floating_point() and not _is_ignored(buffer):
                buffer.data = buffer.to(self.buffer)

    def is_reduced_as_it_is(self, parameters):
        return self.reduce is None or all(parameter.dtype == self.reduce for parameter in parameters)

    def reduce_hook(self, group, bucket):
        """Averages a bucket in the type that gradients are reduced in: for torch's Reducer."""
        sent = bucket.buffer().mul(1 / group.size()).to(self.reduce)
        future = dist.all_reduce(sent, group=group, async_op=True).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


class Cast:
    """A module's parameters in another type, for one forward and its backward. Gradients go to the parameters themselves."""

    def __init__(self, module, dtype, casts):
        """`casts`: what there is already, by parameter."""
        self._places = []
        for part in module.modules():
            for name, own in part._parameters.items():
                if own is None or own.dtype == dtype or _is_ignored(own):
                    continue
                if own not in casts:
                    casts[own] = _ToType.apply(own, dtype)
                self._places.append((part, name, own, casts[own]))

    def run(self, forward):
        """What a forward returns in which these stand in the parameters' places."""
        standing = _Standing(self._places)
        try:
            output = forward()
            self._check_unwritten()
        finally:
            standing()
        self._follow(output)
        return output

    def _check_unwritten(self):
        for part, name, own, cast in self._places:
            if (not cast.is_inference() and cast._version != 0) or part._parameters.get(name) is not cast:
                raise RuntimeError(
                    f"mixed_precision: forward has written to {name} of {type(part).__name__}: only a copy of it in {cast.dtype} has changed, "
                    "which is lost: write to parameters outside of forward"
                )

    def _follow(self, output):
        """Has them stand there in backward as well, for activations that are computed again (checkpoint)."""

        def stand(_):
            # What is queued is called when backward is over, and goes if it fails.
            torch.autograd.Variable._execution_engine.queue_callback(_Standing(self._places))

        for tensor in _find_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(stand)


class _ToType(torch.autograd.Function):
    """`to`, whose gradients may be sparse."""

    @staticmethod
    def forward(context, parameter, dtype):
        context.dtype = parameter.dtype
        return parameter.to(dtype)

    @staticmethod
    def backward(context, gradient):
        return gradient.to(context.dtype), None


class _Standing:
    """Casts stand in the parameters' places until this is called, or goes."""

    _places = ()  # of one whose constructor the compiler has not run

    def __init__(self, places):
        self._places = [place for place in places if place[0]._parameters.get(place[1]) is place[2]]
        for part, name, _, cast in self._places:
            part._parameters[name] = cast

    def __call__(self):
        places, self._places = self._places, []
        for part, name, own, cast in places:
            if part._parameters.get(name) is cast:
                part._parameters[name] = own

    __del__ = __call__


def _is_ignored(tensor):
    return getattr(tensor, "_ddp_ignored", False)
