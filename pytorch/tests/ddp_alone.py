"""What flow_torch.DistributedDataParallel does that torch's class does not: errors where it cannot go on, and shared memory. And what only
the part in C++ does. Two ranks; each prints a line for each case.
"""

import contextlib
import gc
import itertools
import os
import sys
import threading
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn import functional as F
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import flow_torch
from ddp_common import WIDTH, Branches, data, layers


def raised(call, kind):
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def backward(net, *arguments):
    net(*arguments).square().mean().backward()


def callback_of_a_root():
    """The node at which a backward begins is one as others are: callbacks of its hook run later than the hook."""

    def is_later(root):
        order = []

        def hook(_):
            dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda _: order.append("callback"))
            time.sleep(0.1)
            order.append("hook")

        root.register_hook(hook)
        root.backward(torch.ones_like(root))
        return order == ["hook", "callback"]

    return all(is_later(make(torch.ones(3, requires_grad=True))) for make in (lambda leaf: leaf, torch.sum, lambda leaf: leaf.exp() * 2))


def missing_gradients():
    """Both ranks learn of them, in their next forward or, if they wait for them, at once."""
    net, rank = flow_torch.DistributedDataParallel(Branches()), dist.get_rank()
    backward(net, data(), (0, 1))
    first = raised(lambda: backward(net, data(), (0, 1) if rank else (0,)), dist.DistBackendError)
    second = raised(lambda: backward(net, data(), (0, 1)), RuntimeError)
    words = "Expected to have finished reduction", "rank 0: 2 of 6 parameters got no gradient in it: branches.1.0.weight, branches.1.0.bias"
    return all(word in (first if rank else second) for word in words)


def hook_after_missing_gradients():
    """torch's Reducer, to which this hook leaves everything, does not know of them."""
    net = flow_torch.DistributedDataParallel(Branches())
    backward(net, data(), (0,))
    error = raised(lambda: net.register_comm_hook(None, lambda state, bucket: None), RuntimeError)
    return f"rank {dist.get_rank()}: 2 of 6 parameters got no gradient" in error


def hook_of_one_rank():
    net = flow_torch.DistributedDataParallel(layers())
    if dist.get_rank() == 0:
        net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    error = raised(lambda: backward(net, data()), dist.DistBackendError)
    return all(word in error for word in ("rank 0 called", "f16, sum", "rank 1 called", "f32, avg"))


def failed_backward(register=lambda net: None):
    """An error on one rank is one on both; the process group goes on."""
    net, rank = flow_torch.DistributedDataParallel(layers()), dist.get_rank()
    register(net)
    backward(net, data())

    def fails(grad):
        raise ValueError("no more")

    if rank == 1:
        net.module[0].weight.register_hook(fails)
    error = raised(lambda: backward(net, data()), (dist.DistBackendError, ValueError))
    again = raised(lambda: backward(net, data()), RuntimeError)
    ones = torch.ones(3)
    dist.all_reduce(ones)
    net = flow_torch.DistributedDataParallel(layers())
    backward(net, data())
    return ("no more" if rank else "rank 1: its backward ended before") in error and "wrap the model again" in again and ones[0] == 2


def local_sgd(net, subgroup, sums=True):
    state = PostLocalSGDState(None, subgroup, 1, post_local_gradient_allreduce=sums)
    net.register_comm_hook(state, post_localSGD_hook)


def failed_backward_in_a_subgroup():
    subgroup = dist.new_group()
    return failed_backward(lambda net: local_sgd(net, subgroup))


def gradients_that_are_not_summed_up():
    """They stay where they are, and nothing is sent."""
    net = flow_torch.DistributedDataParallel(layers())
    local_sgd(net, None, sums=False)
    sent, batch = [], data() + dist.get_rank()
    for _ in range(3):
        net.zero_grad()
        backward(net, batch)
        sent.append(sum(bucket.bytes for bucket in net.stats().buckets))
    reduced = [p.grad for p in net.parameters()]
    own = torch.autograd.grad(net.module(batch).square().mean(), net.parameters())
    return sent[0] > 0 and sent[1:] == [0, 0] and all(map(torch.equal, reduced, own)) and flow_torch.is_shared(reduced[0])


def differing_models():
    error = raised(lambda: flow_torch.DistributedDataParallel(layers(1 + dist.get_rank()), process_group=dist.new_group()), RuntimeError)
    return "DDP expects same model across all ranks" in error


def marked_twice():
    """By reentrant checkpoints over the same layers, while gradients of others are still to come."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = layers(1), layers(1)

        def forward(self, x):
            x = self.first(x)
            for _ in range(2):
                x = checkpoint(self.second, x, use_reentrant=True)
            return x

    net = flow_torch.DistributedDataParallel(Twice())
    error = raised(lambda: net(data()).sum().backward(), RuntimeError)
    return "mark a variable ready only once" in error and "second.0" in error


def gradients_with_a_graph():
    """torch's class cannot reduce them on CPUs."""
    net, batch, grads = flow_torch.DistributedDataParallel(layers()), data(), []
    for create_graph in (False, True):
        net.zero_grad()
        net(batch).square().mean().backward(create_graph=create_graph)
        grads.append([p.grad.detach().clone() for p in net.parameters()])
    return all(torch.equal(plain, other) for plain, other in zip(*grads)) and net.module[0].weight.grad.requires_grad


def distributed_autograd():
    """Its gradients go to a context, and torch's Reducer finds them there."""
    distributed_autograd = torch.distributed.autograd
    distributed_autograd._init(dist.get_rank())
    net = flow_torch.DistributedDataParallel(layers())
    with distributed_autograd.context() as context:
        distributed_autograd.backward(context, [net(data() + dist.get_rank()).square().mean()])
        found = distributed_autograd.get_gradients(context)
        own = found[net.module[0].weight]
    other = own.clone()
    dist.broadcast(other, 0)
    return torch.equal(own, other) and net.module[0].weight.grad is None


def changed_type():
    """torch's class reduces no gradients from then on, and says nothing. The other rank learns of it in its backward."""
    net = flow_torch.DistributedDataParallel(layers())
    backward(net, data())
    if dist.get_rank() == 0:
        net.double().float()
    return "rank 0: the type of 0.weight has changed" in raised(lambda: backward(net, data()), RuntimeError)


def sparse_unawares():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Parameter(torch.randn(600, WIDTH))

        def forward(self, index):
            return F.embedding(index, self.rows, sparse=True)

    net = flow_torch.DistributedDataParallel(Rows())
    return "the gradient of rows is Sparse" in raised(lambda: backward(net, torch.arange(9)), RuntimeError)


def changed_graph():
    net = flow_torch.DistributedDataParallel(Branches(), static_graph=True)
    backward(net, data(), (0,))
    backward(net, data(), (0,))
    return "branches.1.0" in raised(lambda: backward(net, data(), (0, 1)), RuntimeError)


def statistics():
    """Of three backwards, in each of which one of two embeddings, a large and a small matrix have gradients."""

    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.unused = (nn.Embedding(600, 150, sparse=True) for _ in range(2))
            self.large, self.small = nn.Linear(150, 150, bias=False), nn.Linear(150, 2, bias=False)

        def forward(self, words):
            return self.small(self.large(self.table(words)))

    net = flow_torch.DistributedDataParallel(Several(), bucket_cap_mb=0.05, find_unused_parameters=True)
    before = net.stats().backwards
    for _ in range(3):
        net.zero_grad()
        net(torch.tensor([1, 2, 2])).sum().backward()
    stats = net.stats()
    of_bucket = {name: bucket for bucket in stats.buckets for name in bucket.parameters}
    row = 150 * 4
    expected = {"table.weight": (2 * (row + 8), 0), "unused.weight": (0, 0), "large.weight": (150 * row, 150 * row), "small.weight": (2 * row, 0)}
    sizes = {name: (bucket.bytes, bucket.in_place) for name, bucket in of_bucket.items()}
    rounding = 1e-9
    is_timed = all(
        0 <= bucket.ready_at <= stats.backward
        and 0 <= bucket.behind_backward <= bucket.ready_to_done > 0
        and bucket.ready_at + bucket.ready_to_done <= stats.backward + stats.exposed + rounding
        and bucket.ready_at + bucket.behind_backward <= stats.backward + rounding
        for bucket in stats.buckets
    )
    is_timed = is_timed and 0 <= stats.hidden() <= 1
    net.register_comm_hook(None, lambda state, bucket: None)
    is_torchs = net.stats() is None
    return before == 0 and stats.backwards == 3 and sizes == expected and is_timed and stats.exposed > 0 and is_torchs


def reductions_behind_backward():
    """The first bucket is reduced while backward runs: each rank has launched it when both come to the second layer from the end, and has done
    its share when both come to the third. That it is over, a rank may note later, if it gets no processor then: not in all backwards."""
    net = flow_torch.DistributedDataParallel(layers(4), bucket_cap_mb=1e-4)
    for _ in range(2):
        backward(net, data())
    other, found = dist.new_group(), []
    for layer in net.module[4], net.module[2]:
        layer.weight.register_hook(lambda _: dist.barrier(group=other))
    for _ in range(20):
        backward(net, data())
        stats = net.stats()
        first = stats.buckets[0]
        assert 0 < first.behind_backward <= first.ready_to_done and stats.hidden() > 0
        found.append(first.behind_backward == first.ready_to_done and first.ready_at + first.ready_to_done < stats.backward)
    return any(found)


def workers():
    """Between steps, and with gradients, processes are forked."""
    net = flow_torch.DistributedDataParallel(layers())
    batches = DataLoader(TensorDataset(torch.arange(32 * float(WIDTH)).view(32, WIDTH)), batch_size=8, num_workers=2)
    for (batch,) in batches:
        net.zero_grad()
        backward(net, batch)
    grad = net.module[0].weight.grad
    before = grad.clone()
    child = os.fork()
    if child == 0:
        # What it frees stays its parent's, and what it allocates is its own; its own backward is an error.
        net.zero_grad()
        error = raised(lambda: backward(net, data()), RuntimeError)
        own = nn.Linear(WIDTH, WIDTH)
        own(data()).sum().backward()
        os._exit("forked" not in error or flow_torch.is_shared(own.weight.grad))
    _, status = os.waitpid(child, 0)
    backward(net, batch)
    return status == 0 and flow_torch.is_shared(grad) and torch.allclose(grad, 2 * before)


def memory():
    """Gradients outlive what made them; without that, backward allocates as before."""
    gc.collect()  # models of other cases
    net = flow_torch.DistributedDataParallel(layers())
    backward(net, data())
    grad = net.module[0].weight.grad
    was_shared, values = flow_torch.is_shared(grad), grad.clone()
    net = net.module
    net.zero_grad()
    backward(net, data())
    return was_shared and torch.equal(grad, values) and not flow_torch.is_shared(net[0].weight.grad)


def clones(net):
    return {name: value.clone() for name, value in net.module.state_dict().items()}


def replaced_parameters():
    """Each rank would train the new ones alone, and say nothing."""
    net = flow_torch.DistributedDataParallel(layers(), process_group=dist.new_group())
    backward(net, data())
    net.module.load_state_dict(clones(net), assign=True)
    error = raised(lambda: backward(net, data()), RuntimeError)
    net = flow_torch.DistributedDataParallel(net.module)
    backward(net, data())
    words = f"rank {dist.get_rank()}: parameters that have come", "0.weight, 0.bias, 2.weight", "wrap the module again"
    return all(word in error for word in words)


def parameter_replaced_on_one_rank():
    """The other learns of it where it waits: for buffers or for what torch's Reducer agrees on, in its forward, or in its backward. A group
    that has failed can be left."""

    def is_known(rank, steps, last, hook):
        group = dist.new_group(timeout=timedelta(seconds=20))
        net = flow_torch.DistributedDataParallel(nn.Sequential(*layers(2), last), process_group=group)
        if hook is not None:
            net.register_comm_hook(group, hook)
        for _ in range(steps):
            backward(net, data())
        if dist.get_rank() == rank:
            net.module[2].weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        error = raised(lambda: backward(net, data()), RuntimeError)
        dist.destroy_process_group(group)
        return f"rank {rank}: parameters that have come" in error and "2.weight: wrap the module again" in error

    hooks = None, lambda group, bucket: default_hooks.allreduce_hook(group, bucket)
    cases = itertools.product((0, 1), range(3), (nn.Tanh(), nn.BatchNorm1d(WIDTH)), hooks)
    return all(is_known(*case) for case in cases)


def parameter_that_was_frozen():
    net = layers()
    net[0].requires_grad_(False)
    net = flow_torch.DistributedDataParallel(net, process_group=dist.new_group())
    backward(net, data())
    net.module[0].weight.requires_grad_(True)
    return "0.weight: wrap the module again" in raised(lambda: backward(net, data()), RuntimeError)


def layer_that_was_added():
    net = flow_torch.DistributedDataParallel(layers(), process_group=dist.new_group())
    backward(net, data())
    net.module.append(nn.Linear(WIDTH, WIDTH))
    return "6.weight, 6.bias: wrap the module again" in raised(lambda: backward(net, data()), RuntimeError)


def module_that_was_replaced():
    """By another one, and by one around it. Whenever that was, the next forward says so."""

    def is_noticed(replace, name, when):
        net = flow_torch.DistributedDataParallel(layers(), process_group=dist.new_group())
        if when != "before the first forward":
            backward(net, data())
        loss = net(data()).square().mean() if when == "between forward and backward" else None
        net.module = replace(net.module)
        if loss is not None:
            loss.backward()
        with net.no_sync() if when == "in no_sync" else contextlib.nullcontext():
            error = raised(lambda: backward(net, data()), RuntimeError)
        return f"rank {dist.get_rank()}: parameters that have come" in error and f"{name}: wrap the module again" in error

    return all(
        is_noticed(replace, name, when)
        for when in ("before the first forward", "between steps", "between forward and backward", "in no_sync")
        for replace, name in ((lambda _: layers(), "4.bias"), (lambda old: nn.Sequential(old, nn.Linear(WIDTH, WIDTH)), ": 1.weight, 1.bias"))
    )


def layers_that_have_moved():
    """They are reduced as before, or ignored as before."""
    net = layers()
    flow_torch.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["2.weight"])
    net = flow_torch.DistributedDataParallel(net)
    backward(net, data())
    net.module = nn.Sequential(net.module, nn.Tanh())
    net.zero_grad()
    backward(net, data() + dist.get_rank())
    own = net.module[0][0].weight.grad
    other = own.clone()
    dist.broadcast(other, 0)
    return torch.equal(own, other)


def missing_in_a_static_graph():
    """The advice is none that was followed."""
    net = flow_torch.DistributedDataParallel(Branches(), static_graph=True)
    for taken in (0, 1), (0, 1), (0,):
        backward(net, data(), taken)
    error = raised(lambda: backward(net, data(), (0, 1)), RuntimeError)
    return "2 of 6 parameters got no gradient" in error and "With static_graph=True each backward" in error


def statistics_for_a_buffer_hook():
    """Backward waits for the hook's future, which a thread completes that asks for them first."""
    net = flow_torch.DistributedDataParallel(nn.Sequential(*layers(1), nn.BatchNorm1d(WIDTH)))
    asked = []

    def complete(future):
        time.sleep(0.1)
        asked.append(net.stats().backwards)
        future.set_result(None)

    def hook(group, buffers):
        future = torch.futures.Future()
        threading.Thread(target=complete, args=[future], daemon=True).start()
        return [future]

    net._register_buffer_comm_hook(net.process_group, hook, _BufferCommHookLocation.POST_FORWARD)
    for _ in range(2):
        backward(net, data())
    return asked == [0, 1]


def module_that_goes_in_its_backward():
    """A cycle keeps the wrapped module, which is collected when all gradients are there: the end of backward needs torch's Reducer."""
    net = flow_torch.DistributedDataParallel(layers())
    net.itself = net
    parameters, loss, alive = list(net.parameters()), net(data()).sum(), []
    module, reducer = weakref.ref(net), weakref.ref(net.reducer)

    def collect():
        gc.collect()
        alive.append((module() is not None, reducer() is not None))

    parameters[-1].register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(collect))
    del net
    loss.backward()
    means = [own.grad.clone() for own in parameters]
    for mean in means:
        dist.all_reduce(mean, dist.ReduceOp.AVG)
    same = all(map(torch.allclose, means, [own.grad for own in parameters]))
    return alive == [(False, True)] and same


CASES = [
    *(missing_gradients, hook_after_missing_gradients, hook_of_one_rank, failed_backward, failed_backward_in_a_subgroup, differing_models),
    *(gradients_that_are_not_summed_up, marked_twice, changed_type, sparse_unawares, changed_graph),
    *(replaced_parameters, parameter_replaced_on_one_rank, parameter_that_was_frozen, layer_that_was_added),
    *(module_that_was_replaced, layers_that_have_moved),
    *(missing_in_a_static_graph, gradients_with_a_graph, distributed_autograd, workers, memory, callback_of_a_root, statistics),
    reductions_behind_backward,
    *(statistics_for_a_buffer_hook, module_that_goes_in_its_backward),
]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("flow", timeout=timedelta(seconds=60))
    failures = 0
    for case in CASES:
        torch.manual_seed(1)
        good = case()
        failures += not good
        print(f"{case.__name__}: {'good' if good else 'BAD'}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
