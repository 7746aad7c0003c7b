"""DiLoCo: ranks train alone for many steps, and an outer optimizer joins what they have learnt."""

import itertools

import torch
import torch.distributed as dist

from . import comm_hooks

# Elements of a range, where changes are sent in 8 bits.
_CHANNEL = 512


class DiLoCo:
    """Distributed low-communication training (A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
    and "Streaming DiLoCo with Overlapping Communication", 2025): for slow networks between machines. The names are torchft's, which needs a
    Manager where this needs a process group; None is the default one.

    Each rank trains with `inner_optimizer`. Every `sync_every` steps of it the ranks' changes of the parameters are averaged. `outer_optimizer`
    takes the average for a gradient, and changes with it the parameters that all ranks began with. From those all ranks go on. It is made of
    the same parameters, of which it gets copies, and the paper's is SGD with Nesterov momentum of 0.9 and a rate of 0.7.

    The modules of `model_fragments` are exchanged at different times, so that the network is busy all the time. `fragment_sync_delay` are the
    steps that training goes on while a fragment is exchanged, and `fragment_update_alpha` is the share of each rank's own parameters in what it
    goes on with. `should_quantize` has changes sent in 8 bits. Buffers stay each rank's own.

    All ranks make it alike, with rank 0's parameters. See docs/torch.md.
    """

    def __init__(
        self,
        process_group,
        model_fragments,
        inner_optimizer,
        outer_optimizer,
        sync_every=100,
        should_quantize=False,
        fragment_sync_delay=0,
        fragment_update_alpha=0.0,
    ):
        self._group = dist.group.WORLD if process_group is None else process_group
        self.outer_optimizer = outer_optimizer
        self._sync_every, self._delay, self._alpha, self._quantizes = sync_every, fragment_sync_delay, fragment_update_alpha, should_quantize
        # What a checkpoint keeps, beside the state of the outer optimizer.
        self.steps = 0
        known, parts = set(), []
        for module in model_fragments:
            parts.append([own for own in module.parameters() if own.requires_grad and own not in known])
            known.update(parts[-1])
        options = {
            "sync_every": sync_every,
            "should_quantize": should_quantize,
            "fragment_sync_delay": fragment_sync_delay,
            "fragment_update_alpha": fragment_update_alpha,
            "outer_optimizer": outer_optimizer.defaults,
        }
        shapes = [f"fragment {index}: {own.dtype} {list(own.shape)}" for index, part in enumerate(parts) for own in part]
        self._check_alike([*(f"{name} {value}" for name, value in options.items()), *shapes], self._unfit(parts, known))
        self._modules, self._known = list(model_fragments), known
        self._fragments = [_Fragment(part, self._group) for part in parts]
        copies = {own: copy for fragment in self._fragments for own, copy in zip(fragment.own, fragment.common)}
        for group in outer_optimizer.param_groups:
            group["params"] = [copies[own] for own in group["params"]]
        self._hook = inner_optimizer.register_step_post_hook(lambda *_: self._step())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._hook.remove()

    @torch.no_grad()
    def synchronize(self):
        """Exchanges what ranks have learnt since the last exchange. All ranks go on with the same parameters. Where an exchange is under way it
        is that one: what ranks have learnt since it began is left out. All ranks call this: before a checkpoint, and at the end."""
        for fragment in self._fragments:
            if fragment.exchange is None:
                self._check_known()
                fragment.begin(self._group, self._quantizes, self.steps)
            fragment.finish(self._group, self.outer_optimizer, 0.0)

    @torch.no_grad()
    def resume(self, steps):
        """Goes on after so many steps with the parameters of a checkpoint, which all ranks have loaded."""
        for fragment in self._fragments:
            fragment.exchange = None
            for own, common in zip(fragment.own, fragment.common):
                common.copy_(own)
        self.steps = steps

    @torch.no_grad()
    def _step(self):
        self.steps += 1
        count = len(self._fragments)
        for index, fragment in enumerate(self._fragments):
            turn = (index + 1) * self._sync_every // count
            if self.steps % self._sync_every == turn % self._sync_every:
                self._check_known()
                fragment.begin(self._group, self._quantizes, self.steps + self._delay)
            if fragment.exchange is not None and fragment.due == self.steps:
                fragment.finish(self._group, self.outer_optimizer, self._alpha)

    def _unfit(self, parts, known):
        """What is wrong with the arguments, if anything is."""
        optimized = [own for group in self.outer_optimizer.param_groups for own in group["params"]]
        if not parts or len(parts) > self._sync_every:
            return f"{len(parts)} model_fragments: there must be 1 or more, and not more than sync_every, {self._sync_every}"
        if not all(parts):
            return f"fragment {parts.index([])} has no parameter of its own that requires a gradient"
        if not 0 <= self._delay < self._sync_every:
            return f"fragment_sync_delay {self._delay} must be 0 or more, and below sync_every, {self._sync_every}"
        if not 0 <= self._alpha < 1:
            return f"fragment_update_alpha {self._alpha} must be at least 0 and below 1"
        if not all(own.is_floating_point() for own in known):
            return "parameters must be real floating-point numbers"
        if len(optimized) != len(known) or not known.issuperset(optimized):
            return "outer_optimizer must have the parameters of model_fragments that require gradients, and no others"
        if self.outer_optimizer.state:
            return "outer_optimizer has a state of other parameters: load it into DiLoCo.outer_optimizer"
        return None

    def _check_known(self):
        """Others each rank would train alone."""
        for module in self._modules:
            for name, own in module.named_parameters():
                if own.requires_grad and own not in self._known:
                    raise RuntimeError(
                        f"DiLoCo: rank {self._group.rank()}: {name} of {type(module).__name__} requires a gradient, and did not when DiLoCo was made, "
                        "or is another parameter: make a new DiLoCo on all ranks"
                    )

    def _check_alike(self, own, unfit):
        described = [None] * self._group.size()
        dist.all_gather_object(described, (own, unfit), group=self._group)
        for rank, (its, reason) in enumerate(described):
            if reason is not None:
                raise ValueError(f"DiLoCo: rank {rank}: {reason}")
            for first, other in itertools.zip_longest(described[0][0], its, fillvalue="no such parameter"):
                if first != other:
                    raise ValueError(f"DiLoCo: ranks differ: rank 0 has {first}, rank {rank} has {other}")


class _Fragment:
    """A part of the model."""

    def __init__(self, own, group):
        # This rank's parameters, and those that all ranks have in common, which the outer optimizer changes.
        self.own, self.common = own, []
        for parameter in own:
            dist.broadcast(parameter.detach(), group=group, group_src=0)
            self.common.append(torch.nn.Parameter(parameter.detach().to(comm_hooks.wide(parameter.dtype), copy=True)))
        # The step that takes the average.
        self.due = self.exchange = self._came = None

    def begin(self, group, quantizes, due):
        """Starts to average the ranks' changes."""
        # In the parameter's type: what that rounds off is not learnt.
        change = torch.cat([(common.to(own.dtype).to(common.dtype) - own.to(common.dtype)).flatten() for own, common in zip(self.own, self.common)])
        self.due, number = due, torch.tensor([due])
        self._came = number.new_empty(group.size())
        # Ranks in different steps must not take each other's changes.
        counted = dist.all_gather_into_tensor(self._came, number, group=group, async_op=True).get_future()
        if quantizes and change.numel():
            mean = comm_hooks.quantized_mean(group, change, _CHANNEL)
        else:
            sums = dist.all_reduce(change, group=group, async_op=True).get_future()
            mean = sums.then(lambda _: change / group.size())
        self.exchange = counted, mean

    def finish(self, group, outer, alpha):
        """Waits for the average and has the outer optimizer take it."""
        (counted, mean), self.exchange = self.exchange, None
        counted.wait()
        if len(set(self._came.tolist())) > 1:
            raise RuntimeError(f"DiLoCo: rank {group.rank()}: ranks are in different steps: what was exchanged is due in {self._came.tolist()}")
        mean = mean.wait()
        for common, gradient in zip(self.common, mean.split([common.numel() for common in self.common])):
            common.grad = gradient.view(common.shape).to(common.dtype)
        # Where no rank has learnt anything, momentum would change the parameters. What has no gradient, other fragments, is left out.
        if mean.any():
            outer.step()
        for own, common in zip(self.own, self.common):
            common.grad = None
            own.copy_(common.lerp(own.to(common.dtype), alpha))
