"""What flow_torch.Elastic does after failures at certain places, and says where it is used in a wrong way: two ranks of flow-launch
--elastic in-place. A line for each case and rank."""

import contextlib
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward

import flow_torch
from alone import error_of
from flow_torch import bindings

RANK = int(os.environ["RANK"])


def training(state=None, size=4, wrap=flow_torch.DistributedDataParallel, net=None):
    net = net or torch.nn.Linear(size, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    flow_torch.Elastic._is_used = False  # each case stands for a process of its own
    return flow_torch.Elastic(net, optimizer, {"step": 0} if state is None else state, wrap), optimizer


def lose_a_rank():
    """As far as Elastic knows: the next operation fails on both."""
    bindings.find_backend(dist.group.WORLD).fail("a test")
    dist.barrier()


@contextlib.contextmanager
def step_in_which_rank_1_falls_behind(elastic, name):
    """A step that rank 0 does, in a block without communication, and rank 1 does not. It takes what rank 0 has."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    with elastic.step():
        yield
        if RANK == 1:
            store.wait([name])
            lose_a_rank()
    if RANK == 0:
        store.set(name, "")
        with elastic.step():
            dist.barrier()


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

def model_on_another_device():
    return says("on another device", lambda: training(net=torch.nn.Linear(4, 1, device="meta")), ValueError)


def optimizer_of_another_class():
    return says("is a torch.optim.Optimizer", lambda: flow_torch.Elastic(torch.nn.Linear(4, 1), object(), {}), TypeError)


def sharded_optimizer():
    flow_torch.reconfigure()
    net = torch.nn.Linear(4, 1)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    return says("without ZeroRedundancyOptimizer", lambda: flow_torch.Elastic(net, optimizer, {}), ValueError)


def parameters_of_no_module():
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*net.parameters(), torch.nn.Parameter(torch.zeros(1))])
    return says("that are not the model's", lambda: flow_torch.Elastic(net, optimizer, {}), ValueError)


def second_elastic():
    first, optimizer = training()
    second = flow_torch.Elastic(first._bare, optimizer, {})
    with first:
        pass
    return says("has had an Elastic", second.__enter__)


def second_optimizer():
    elastic, _ = training()
    other = torch.optim.SGD(elastic._bare.parameters(), lr=1.0)

    def step():
        with elastic.step():
            other.step()

    with elastic:
        return says("another optimizer steps", step)


def weights_that_are_changed_before_a_loss():
    elastic, _ = training()

    def step():
        with elastic.step(), torch.no_grad():
            elastic.model.module.weight.clamp_(0)
            lose_a_rank()

    with elastic:
        is_good = says("the step is half done", step)
        elastic._change(None)  # for the end
        return is_good


def gradients_that_a_step_leaves():
    elastic, _ = training()
    with elastic:
        with elastic.step():
            elastic.model(torch.ones(1, 4)).sum().backward()
        return says("accumulate in one block", elastic.step().__enter__)


def gradients_of_a_step_that_is_left_out():
    """By a GradScaler; and by the program, which zeroes them."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    elastic, optimizer = training({"scaler": scaler})
    with elastic:
        with elastic.step():
            scaler.scale(elastic.model(torch.full((1, 4), float("inf"))).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        with elastic.step():
            elastic.model(torch.ones(1, 4)).sum().backward()
            optimizer.zero_grad(set_to_none=False)
        with elastic.step() as step:
            pass
        return step.is_done


def communication_between_steps():
    elastic, _ = training()
    with elastic:
        with elastic.step():
            pass
        dist.barrier()
        return says("communicates between steps", elastic.step().__enter__)


def communication_that_is_under_way_at_the_optimizer():
    elastic, optimizer = training()
    with elastic, elastic.step():
        receive = dist.irecv(torch.zeros(1), 1 - RANK)
        is_good = says("under way at optimizer.step()", optimizer.step)
        dist.barrier()  # else the other rank's message may come before this rank has asked
        dist.isend(torch.ones(1), 1 - RANK).wait()
        receive.wait()
        optimizer.step()
        return is_good


def wait_that_is_over_before_the_operation():
    """A helper thread runs that, if it comes first. It is a loss on both ranks."""
    elastic, _ = training()
    with elastic:
        with elastic.step() as step:
            if elastic.changes == 1 and RANK == 0:
                receive = dist.irecv(torch.zeros(1), 1)
                time.sleep(0.2)
                receive.wait(timedelta(milliseconds=10))
            dist.barrier()
        return not step.is_done and elastic.changes == 2


class Counter(torch.nn.Module):
    """Counts calls, in an extra state."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        return self.linear(images)

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, calls):
        self.calls = calls


def modules_of_a_step_that_fails():
    net = Counter()
    elastic, _ = training(net=net)
    with elastic:
        with elastic.step() as step:
            net.eval()
            elastic.model(torch.ones(1, 4))
            lose_a_rank()
        return not step.is_done and net.calls == 0 and net.training and net.linear.training and elastic.model.training


def modules_of_a_rank_that_is_behind():
    net = Counter()
    elastic, _ = training(net=net)
    with elastic:
        with step_in_which_rank_1_falls_behind(elastic, "modules"):
            net.eval()
            net.linear.train()
            net.calls += 7
        return net.calls == 7 and not net.training and net.linear.training and not elastic.model.training


def random_numbers_of_a_rank_that_is_behind():
    """All ranks draw the same, also after it has taken another one's state."""
    torch.manual_seed(0)
    state = {"step": 0}
    elastic, _ = training(state)
    with elastic:
        with step_in_which_rank_1_falls_behind(elastic, "random numbers"):
            torch.randperm(8)
            state["step"] += 1
        while state["step"] < 2:
            with elastic.step():
                drawn = torch.rand(1)
                sums = drawn.clone()
                dist.all_reduce(sums)
                state["step"] += 1
        return torch.equal(sums, 2 * drawn)


class WithCopy(torch.optim.SGD):
    """Its state has another type than its parameters."""

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["copy"] = torch.full_like(parameter, 1 / 3, dtype=torch.float32)


def type_of_the_optimizers_state():
    net = torch.nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    training()
    optimizer = WithCopy(net.parameters(), lr=1.0)
    elastic = flow_torch.Elastic(net, optimizer, {})
    with elastic:
        with step_in_which_rank_1_falls_behind(elastic, "types"):
            if RANK == 0:
                optimizer.step()
        return torch.equal(optimizer.state[net.weight]["copy"], torch.full((1, 4), 1 / 3))


def tensors_of_the_state():
    """Views of little memory, and such that know how they were computed."""
    state = {"expanded": torch.zeros(1), "with graph": torch.zeros(2)}
    elastic, _ = training(state)
    with elastic:
        with step_in_which_rank_1_falls_behind(elastic, "tensors"):
            state["expanded"] = torch.ones(1).expand(3, 2)
            state["with graph"] = torch.arange(6.0, requires_grad=True).view(2, 3).t() * 2
        is_good = torch.equal(state["expanded"], torch.ones(3, 2))
        return is_good and torch.equal(state["with graph"], 2 * torch.arange(6.0).view(2, 3).t())


def object_within_a_value():
    net = torch.nn.Linear(4, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net.parameters(), lr=0.1), 1)
    elastic, _ = training({"schedulers": [scheduler]})
    with elastic:
        return says("StepLR in a value: put it at the top of the state", elastic.step().__enter__, TypeError)


def object_that_is_taken_away():
    state = {"scaler": torch.amp.GradScaler("cpu")}
    elastic, _ = training(state)

    def step():
        with elastic.step():
            state["scaler"] = None
            lose_a_rank()

    with elastic:
        is_good = says("no object in the state at 'scaler'", step)
        elastic._change(None)  # for the end
        return is_good


class WithScaler:
    """A state that has a GradScaler within."""

    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def state_dict(self):
        return {"scaler": self.scaler.state_dict()}

    def load_state_dict(self, values):
        self.scaler.load_state_dict(values["scaler"])


def scaler_of_an_object():
    state = WithScaler()
    elastic, optimizer = training(state)
    with elastic:
        before = elastic.model.module.weight.detach().clone()
        is_done = False
        while not is_done:
            with elastic.step() as step:
                state.scaler.scale(elastic.model(torch.ones(1, 4)).sum()).backward()
                state.scaler.unscale_(optimizer)
                if elastic.changes == 1:
                    lose_a_rank()
                state.scaler.step(optimizer)
                state.scaler.update()
            is_done = step.is_done
        return elastic.changes == 2 and torch.equal(before - 0.125, elastic.model.module.weight)


def group_of_parameters_that_a_step_adds():
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD([net.weight], lr=0.125)
    training()
    elastic = flow_torch.Elastic(net, optimizer, {})
    with elastic:
        with elastic.step():
            optimizer.add_param_group({"params": [net.bias]})
            lose_a_rank()
        return len(optimizer.param_groups) == 1


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
    model_on_another_device,
    optimizer_of_another_class,
    sharded_optimizer,
    parameters_of_no_module,
    second_elastic,
    second_optimizer,
    weights_that_are_changed_before_a_loss,
    gradients_that_a_step_leaves,
    gradients_of_a_step_that_is_left_out,
    communication_between_steps,
    communication_that_is_under_way_at_the_optimizer,
    wait_that_is_over_before_the_operation,
    modules_of_a_step_that_fails,
    modules_of_a_rank_that_is_behind,
    random_numbers_of_a_rank_that_is_behind,
    type_of_the_optimizers_state,
    tensors_of_the_state,
    object_within_a_value,
    object_that_is_taken_away,
    scaler_of_an_object,
    group_of_parameters_that_a_step_adds,
    different_operations,
    another_model,
]


def main():
    torch.set_num_threads(1)
    for case in CASES:
        print(f"{case.__name__}: {'good' if case() else 'BAD'}", flush=True)


if __name__ == "__main__":
    main()
