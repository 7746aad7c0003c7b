"""PyTorch's communication hooks that must know when a backward is over whose gradients were reduced in place.

Torch's Reducer calls them with its buckets as usual. Where gradients are reduced in place they get a bucket at the end, without parameters.
"""

import torch
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook


def post_local_sgd(state, bucket):
    """post_localSGD_hook, which counts backwards."""
    if bucket.parameters():
        return post_localSGD_hook.post_localSGD_hook(state, bucket)
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
    return _done(bucket)


def step_in_backward(reference, bucket):
    """Runs the optimizers of _apply_optimizer_in_backward. `reference`: a weak one to the module."""
    net, reduced = reference(), bucket.parameters()
    if reduced:
        net.reducer._run_allreduce_hook(bucket).wait()
        bucket.buffer().div_(net.process_group.size())
        for parameter, gradient in zip(reduced, bucket.gradients()):
            parameter.grad = gradient
    for parameter in reduced or net._reduced:
        optimizers = getattr(parameter, "_in_backward_optimizers", ())
        for optimizer in optimizers:
            optimizer.step()
        if optimizers:
            parameter.grad = None
    return _done(bucket)


def _done(bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
