"""What flow_torch.Elastic does after failures at certain places, and says where it is used in a wrong way: two ranks of flow-launch
--elastic in-place. A line for each case and rank."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward

import flow_torch
from alone import error_of
from flow_torch import bindings

RANK = int(os.environ["RANK"])


def training(state=None, size=4, wrap=flow_torch.DistributedDataParallel):
    net = torch.nn.Linear(size, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    return flow_torch.Elastic(net, optimizer, {"step": 0} if state is None else state, wrap), optimizer


def says(text, call, kind=RuntimeError):
    return text in error_of(call, kind)


def state_without_state_dict():
    return says("the state is a dictionary, or has state_dict()", lambda: training([0]), TypeError)


def state_that_cannot_be_sent():
    elastic, _ = training({"key": lambda: None})
    with elastic:
        return says("the state cannot be sent", elastic.step().__enter__, TypeError)


def optimizer_in_backward():
    net = torch.nn.Linear(4, 1)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    return says("_apply_optimizer_in_backward", lambda: flow_torch.Elastic(net, None, {}), ValueError)


def sharded_parameters():
    flow_torch.reconfigure()
    net = fully_shard(torch.nn.Linear(4, 4))
    return says("Elastic works without FSDP", lambda: flow_torch.Elastic(net, None, {}), ValueError)


def job_that_is_not_elastic():
    elastic, _ = training()
    replacement = os.environ.pop("FLOW_REPLACEMENT")
    try:
        return says("--elastic in-place", elastic.__enter__)
    finally:
        os.environ["FLOW_REPLACEMENT"] = replacement


def default_group_of_others():
    elastic, _ = training()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return says("there is another default group", elastic.__enter__)
    finally:
        dist.destroy_process_group()


def step_without_elastic():
    elastic, _ = training()
    return says("`with elastic:`", elastic.step().__enter__)


def step_in_a_step():
    elastic, _ = training()
    with elastic, elastic.step():
        return says("not within another step", elastic.step().__enter__)


def optimizer_outside():
    elastic, optimizer = training()
    with elastic:
        return says("outside of `with elastic.step()`", optimizer.step)


def communication_after_the_optimizer(communicate):
    elastic, optimizer = training()

    def step():
        with elastic.step():
            loss = elastic.model(torch.ones(1, 4)).sum()
            loss.backward(retain_graph=True)
            optimizer.step()
            communicate(loss)

    with elastic:
        return says("communicates after optimizer.step()", step)


def all_reduce_after_the_optimizer():
    return communication_after_the_optimizer(lambda _: dist.all_reduce(torch.ones(1)))


def gather_after_the_optimizer():
    return communication_after_the_optimizer(lambda _: dist.all_gather_object([None, None], 1))


def model_of_before(wrap=flow_torch.DistributedDataParallel):
    """It has begun a step, and is kept: the gradients of the next one do not come to it as well."""
    elastic, optimizer = training(wrap=wrap)
    with elastic:
        before, weights = elastic.model, elastic.model.module.weight.detach().clone()
        with elastic.step():
            before(torch.ones(1, 4)).sum().backward()
            before(torch.ones(1, 4))
            bindings.find_backend(dist.group.WORLD).fail("a test")
            dist.barrier()
        is_good = says("take elastic.model", lambda: before(torch.ones(1, 4)))
        with elastic.step():
            elastic.model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        return is_good and torch.equal(weights - 0.125, elastic.model.module.weight)


def torchs_model_of_before():
    return model_of_before(torch.nn.parallel.DistributedDataParallel)


def error_of_the_program():
    """It is none of another rank's, and ends the loop. What was changed stays."""
    elastic, _ = training()

    def step():
        with elastic.step():
            raise ValueError("no such file")

    with elastic:
        return says("no such file", step, ValueError)


def errors_that_a_block_hides():
    """The step is repeated nevertheless, with an optimizer and without."""
    state, blocks = {"step": 0}, 0
    elastic, optimizer = training(state)
    with elastic:
        while state["step"] < 2:
            with elastic.step():
                blocks += 1
                if elastic.changes == 1 + state["step"]:
                    bindings.find_backend(dist.group.WORLD).fail("a test")
                    error_of(lambda: dist.all_reduce(torch.ones(1)))
                elastic.model(torch.ones(1, 4)).sum().backward()
                if state["step"] == 0:
                    optimizer.step()
                state["step"] += 1
    return blocks == 4


def rank_that_is_behind():
    """Rank 1 fails in a step that rank 0 has finished: it takes weights and state from there."""
    state = {"step": 0}
    elastic, optimizer = training(state)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    with elastic:
        before, blocks = elastic.model.module.weight.detach().clone(), 0
        while state["step"] < 3:
            with elastic.step():
                blocks += 1
                elastic.model(torch.ones(1, 4)).sum().backward()
                if (RANK, blocks) == (1, 2):
                    store.wait(["rank 0 has finished the step"])
                    bindings.find_backend(dist.group.WORLD).fail("a test")
                    dist.barrier()
                optimizer.step()
                state["step"] += 1
                if (RANK, blocks) == (0, 2):
                    store.set("rank 0 has finished the step", "")
        # Rank 0 has done all three steps, and one of them twice.
        return blocks == 4 - RANK and torch.equal(before - 3 * 0.125, elastic.model.module.weight)


def failure_of_unscaled_gradients():
    """The GradScaler takes them for scaled again."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    state = {"scaler": scaler, "step": 0}
    elastic, optimizer = training(state)
    with elastic:
        before = elastic.model.module.weight.detach().clone()
        while state["step"] < 1:
            with elastic.step():
                scaler.scale(elastic.model(torch.ones(1, 4)).sum()).backward()
                scaler.unscale_(optimizer)
                if elastic.changes == 1:
                    bindings.find_backend(dist.group.WORLD).fail("a test")
                dist.barrier()
                scaler.step(optimizer)
                scaler.update()
                state["step"] += 1
        return elastic.changes == 2 and torch.equal(before - 0.125, elastic.model.module.weight)


def different_operations():
    """An error on both ranks, and not the loss of one."""
    elastic, _ = training()

    def step():
        with elastic.step():
            dist.all_reduce(torch.ones(1 + RANK))

    with elastic:
        is_good = "called all_reduce" in error_of(step)
        elastic._change(None)  # for the end
        return is_good


def another_model():
    """The other rank goes on when the process has ended."""
    elastic, _ = training(size=4 + RANK)
    if RANK == 1:
        return says("rank 1 has another model or optimizer", elastic.__enter__)
    with elastic:
        return dist.get_world_size() == 1


CASES = [
    default_group_of_others,  # before one is made
    job_that_is_not_elastic,
    state_without_state_dict,
    state_that_cannot_be_sent,
    optimizer_in_backward,
    sharded_parameters,
    step_without_elastic,
    step_in_a_step,
    optimizer_outside,
    all_reduce_after_the_optimizer,
    gather_after_the_optimizer,
    model_of_before,
    torchs_model_of_before,
    error_of_the_program,
    errors_that_a_block_hides,
    rank_that_is_behind,
    failure_of_unscaled_gradients,
    different_operations,
    another_model,
]


def main():
    torch.set_num_threads(1)
    for case in CASES:
        print(f"{case.__name__}: {'good' if case() else 'BAD'}", flush=True)


if __name__ == "__main__":
    main()
