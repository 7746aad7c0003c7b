"""flow_torch.SyncBatchNorm against torch.nn.BatchNorm in one process, over the joined batch. A line for each case and rank."""

import copy
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flow_torch

SHAPES = [(), (5,), (3, 4), (2, 1, 3)]


def rows():
    """Those of each rank: none on the last but one, if there are more than two."""
    ranks = dist.get_world_size()
    return [0 if ranks > 2 and rank == ranks - 2 else rank + 2 for rank in range(ranks)]


def part(joined):
    return joined.split(rows())[dist.get_rank()]


def total(tensor):
    result = tensor.detach().clone()
    dist.all_reduce(result)
    return result


def close(actual, expected, tolerance=1e-9):
    return torch.allclose(actual.double(), expected.double(), tolerance, tolerance)


def pairs(channels, dtype, **options):
    """A layer of torch's in double precision, and the same converted."""
    layer = nn.BatchNorm3d(channels, **options).double()
    for parameter in layer.parameters():
        nn.init.uniform_(parameter)
    converted = flow_torch.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(copy.deepcopy(layer)))[0]
    assert type(converted) is flow_torch.SyncBatchNorm
    # Its check of dimensions is that of a batch with five.
    layer._check_input_dim = lambda input: None
    return layer, converted.to(dtype)


def agrees(shape, dtype=torch.float64, tolerance=1e-9, layout=torch.contiguous_format, **options):
    alone, layer = pairs(3, dtype, **options)
    for _ in range(3):
        joined = torch.randn(sum(rows()), 3, *shape).to(dtype).double()
        grad = torch.randn_like(joined).to(dtype).double()
        whole = joined.clone().requires_grad_()
        expected = alone(whole)
        expected.backward(grad)
        own = part(joined).to(dtype).contiguous(memory_format=layout).requires_grad_()
        actual = layer(own)
        actual.backward(part(grad).to(dtype))
        good = close(actual, part(expected), tolerance) and close(own.grad, part(whole.grad), tolerance)
        for parameter, reference in zip(layer.parameters(), alone.parameters()):
            good = good and close(total(parameter.grad), reference.grad, tolerance * 10)
        for buffer, reference in zip(layer.buffers(), alone.buffers()):
            good = good and close(buffer, reference, tolerance)
        alone.zero_grad()
        layer.zero_grad()
        if not good:
            return False
    return True


def shapes():
    return all(agrees(shape) for shape in SHAPES)


def options():
    cases = [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"momentum": 0.7, "eps": 0.1}]
    return all(agrees((4,), **case) for case in cases)


def layouts():
    return agrees((3, 4), layout=torch.channels_last) and agrees((2, 2, 3), layout=torch.channels_last_3d)


def types():
    cases = [(torch.float32, 1e-3), (torch.bfloat16, 0.1), (torch.float16, 0.02)]
    return all(agrees((6, 6), dtype, tolerance) for dtype, tolerance in cases)


def evaluation():
    """Without communication: rank 0 alone."""
    alone, layer = pairs(3, torch.float64)
    x = torch.randn(4, 3, 2, 2, 2).double()
    return dist.get_rank() != 0 or torch.equal(alone.eval()(x), layer.eval()(x))


def gradients_of_gradients():
    alone, layer = pairs(3, torch.float64)
    joined = torch.randn(sum(rows()), 3, 4).double()
    factors = torch.randn_like(joined)

    def second(norm, x, factors):
        x = x.clone().requires_grad_()
        loss = (norm(x) ** 2 * factors).sum()
        first = torch.autograd.grad(loss, [x, *norm.parameters()], create_graph=True)
        function = (first[0] ** 2 * factors).sum() + 0.3 * (first[1].sum() + first[2].sum())
        function.backward()
        return x.grad

    expected = second(alone, joined, factors)
    actual = second(layer, part(joined), part(factors))
    weights = [total(layer.weight.grad), total(layer.bias.grad)]
    return close(actual, part(expected), 1e-7) and all(map(close, weights, [alone.weight.grad, alone.bias.grad]))


def training():
    """20 steps of DDP, and of flow_torch's, on equal batches."""
    return all(trains(wrapper) for wrapper in (DistributedDataParallel, flow_torch.DistributedDataParallel))


def trains(wrapper):
    alone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 300), nn.BatchNorm1d(300)).double()
    net = wrapper(flow_torch.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone)))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (alone, net)]
    for _ in range(20):
        joined = torch.randn(4 * dist.get_world_size(), 3, 6, 6).double()
        for optimizer in optimizers:
            optimizer.zero_grad()
        alone(joined).cos().mean().backward()
        net(joined.chunk(dist.get_world_size())[dist.get_rank()]).cos().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    states = alone.state_dict(), net.module.state_dict()
    return states[0].keys() == states[1].keys() and all(close(states[1][name], values) for name, values in states[0].items())


def one_value():
    _, layer = pairs(3, torch.float64)
    try:
        layer(torch.randn(int(dist.get_rank() == 0), 3).double())
    except ValueError as error:
        return "Expected more than 1 value per channel" in str(error)
    return False


def groups():
    """A layer's own group, of one rank: torch's batch norm."""
    for rank in range(dist.get_world_size()):
        group = dist.new_group([rank])
        if rank == dist.get_rank():
            own = group
    alone, layer = pairs(3, torch.float64)
    layer.process_group = own
    x = torch.randn(4, 3).double() + dist.get_rank()
    return torch.equal(layer(x), alone(x))


CASES = [shapes, options, layouts, types, evaluation, gradients_of_gradients, training, one_value, groups]


def main():
    torch.set_num_threads(1)
    dist.init_process_group(sys.argv[1], timeout=timedelta(seconds=60))
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
