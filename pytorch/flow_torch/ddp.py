"""DistributedDataParallel whose gradients come into being in shared memory, and are reduced there."""

import functools
import inspect
import operator
import warnings
import weakref

import torch
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn import parallel

from . import told_hooks
from .mixed_precision import Cast, MixedPrecision

# What PyTorch's own communication hooks send gradients as; None: as what they are.
_HOOKS = {
    default_hooks.allreduce_hook: None,
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
    post_localSGD_hook: None,
    dist.BuiltinCommHookType.ALLREDUCE: None,
    dist.BuiltinCommHookType.FP16_COMPRESS: torch.float16,
}
_DTYPES = torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch.nn.parallel.DistributedDataParallel, with the same arguments, methods and results.

    Over the backend "flow", gradients on CPUs are not copied: backward computes them in memory that all ranks of the machine reach,
    and while it goes on they are reduced where they are. With other communication hooks than PyTorch's allreduce_hook,
    fp16_compress_hook, bf16_compress_hook and post_localSGD_hook, with `require_manual_backward_finalization`, over another backend, on
    GPUs and without flow_torch's C++ part, it does what torch's class does. `mixed_precision`, which torch has on GPUs only, works on
    CPUs, too. See docs/torch.md.
    """

    # What reduces gradients where they are. None where torch's Reducer does everything.
    _in_place = None
    # Registers the communication hook, with a Reducer of torch's.
    _register_hook = None
    # The state of post_localSGD_hook, and the group that gradients are summed up in at present. None: in none.
    _local_sgd = _summed_in = None
    # The parameters that are reduced, those that are not to be, and what the module consisted of when it was last looked at: each
    # dictionary of parameters and of modules, with its values then.
    _reduced = ()
    _ignored = frozenset()
    _parts = _frozen = ()
    # The types of mixed precision, on CPUs: torch's class has it on GPUs only.
    _types = None

    @functools.wraps(parallel.DistributedDataParallel.__init__)
    def __init__(self, *arguments, **options):
        bound = inspect.signature(super().__init__).bind(*arguments, **options)
        given = bound.arguments
        mixed_precision = given.get("mixed_precision")
        if mixed_precision is not None and all(own.device.type == "cpu" for own in given["module"].parameters()):
            if given.get("delay_all_reduce_named_params"):
                raise ValueError("mixed_precision cannot be combined with delay_all_reduce_named_params on CPUs: leave one of them out")
            # Set as if by a class: there is no module to set it in yet.
            object.__setattr__(self, "_types", MixedPrecision(mixed_precision, given["module"]))
            given["mixed_precision"] = None
        super().__init__(*bound.args, **bound.kwargs)
        if self._types is not None:
            self.mixed_precision = mixed_precision
            self._types.cast_buffers(self.module)
        # Without init_sync ranks must not communicate here.
        if self._in_place is not None and given.get("init_sync", True):
            self._in_place.connect()

    def _ddp_init_helper(self, parameters, expect_sparse_gradient, param_to_name_mapping, static_graph):
        from . import bindings

        self._reduced = tuple(parameters)
        self._ignored = frozenset(own for name, own in self.module.named_parameters() if name in self.parameters_to_ignore)
        self._look_at_parts()
        backend = self._flow_backend(parameters)
        as_view = self.gradient_as_bucket_view
        # In torch's buckets, of which they could be views, are no gradients that are reduced elsewhere.
        self.gradient_as_bucket_view = as_view and backend is None
        try:
            super()._ddp_init_helper(parameters, expect_sparse_gradient, param_to_name_mapping, static_graph)
        finally:
            self.gradient_as_bucket_view = as_view
        if backend is not None:
            names = [param_to_name_mapping[index].removeprefix(".") for index in range(len(parameters))]
            try:
                self._in_place = bindings.InPlaceReducer(backend, self.reducer, names)
            except NotImplementedError as error:  # a PyTorch that is newer than this
                warnings.warn(str(error))
        if self._types is not None and not self._types.is_reduced_as_it_is(parameters):
            self._register_hook = lambda reducer: dist._register_comm_hook(reducer, self.process_group, self._types.reduce_hook)
            self._register_hook(self.reducer)
            if self._in_place is not None:
                self._in_place.reduce_as(self._types.reduce, self._types.param)

    def _flow_backend(self, parameters):
        """The process group's, if it can reduce these parameters' gradients where they are."""
        from . import _backend

        is_torchs = (self.mixed_precision is not None and self._types is None) or self._use_python_reducer
        is_plain = all(p.device.type == "cpu" and p.dtype in _DTYPES for p in parameters)
        if is_torchs or not is_plain or not self._is_over_flow():
            return None
        backend = _backend(self.process_group)
        # The one in Python is a process group.
        return None if isinstance(backend, dist.ProcessGroup) else backend

    def _is_over_flow(self):
        return self.device_type == "cpu" and "flow" in str(dist.get_backend(self.process_group))

    def _leave_to_torch(self):
        """Leaves everything to torch's Reducer from here on."""
        if self._in_place is None:
            return
        expects_backward = self._in_place.leave()
        self._in_place = None
        if self.gradient_as_bucket_view and not expects_backward:
            parameters, expect_sparse_gradient = self._build_params_for_reducer()
            names = self._build_debug_param_to_name_mapping(parameters)
            super()._ddp_init_helper(parameters, expect_sparse_gradient, names, self.static_graph)
            if self._register_hook is not None:
                self._register_hook(self.reducer)
            if self.static_graph:
                self._static_graph_delay_allreduce_enqueued = False
                self.reducer._set_static_graph()
                self.logger._set_static_graph()

    @torch._disable_dynamo
    def _check_parameters(self):
        """An error on all ranks if the module has got parameters that are not reduced: each rank would train these alone."""
        from . import _backend

        if self._types is not None and torch._C._current_graph_task_id() != -1:
            return  # casts stand in the places of parameters, and this forward is one that is computed again
        is_same = all(len(now) == len(then) and all(map(operator.is_, now.values(), then)) for now, then in self._parts)
        if is_same and not any(parameter.requires_grad for parameter in self._frozen):
            return
        known = self._ignored.union(self._reduced)
        alone = [
            name
            for name, own in self.module.named_parameters()
            if own.requires_grad and own not in known and name not in self.parameters_to_ignore
        ]
        if alone:
            named = ", ".join(alone[:20]) + (", ..." if len(alone) > 20 else "")
            cause = (
                f"rank {dist.get_rank(self.process_group)}: parameters that have come, or begun to require gradients, since the module was "
                f"wrapped are not reduced: {named}: wrap the module again, after load_state_dict(assign=True), say"
            )
            if self._in_place is not None:
                self._in_place.fail(cause)
            # The others may also wait in their forward, for buffers, or for buckets of torch's Reducer.
            backend = _backend(self.process_group)
            if backend is not None:
                backend.fail(cause)
            raise RuntimeError(cause)
        self._look_at_parts()

    def _look_at_parts(self):
        # The first one has the module itself.
        dictionaries = [self._modules, *(part for module in self.module.modules() for part in (module._parameters, module._modules))]
        self._parts = [(part, list(part.values())) for part in dictionaries]
        self._frozen = [own for own in self._module_parameters if not own.requires_grad]

    def _run_ddp_forward(self, *inputs, **kwargs):
        forward = functools.partial(super()._run_ddp_forward, *inputs, **kwargs)
        if self._types is None or self._types.param is None:
            return forward()
        dtype = self._types.param
        casts = {} if self._in_place is None else dict(zip(self._reduced, self._in_place.casts(dtype)))
        return Cast(self.module, dtype, casts).run(forward)

    def _pre_forward(self, *inputs, **kwargs):
        if torch.is_grad_enabled():
            self._check_parameters()
            if self._in_place is not None:
                self._in_place.check_finished()
        return super()._pre_forward(*inputs, **kwargs)

    def _post_forward(self, output):
        output = super()._post_forward(output)
        is_synchronized = torch.is_grad_enabled() and self.require_backward_grad_sync
        if is_synchronized:
            self._follow_local_sgd()
        if self._in_place is not None and is_synchronized:
            self._in_place.expect(self._join_config.enable, self._counts_ranks())
        return output

    def _counts_ranks(self):
        """Whether gradients are divided by the number of ranks that have not joined. They are counted for the first module in join() only."""
        config = self._join_config
        return config.enable and config.is_first_joinable and not self._divide_by_initial_world_size

    def _match_all_reduce_for_bwd_pass(self):
        self._follow_local_sgd()
        if self._in_place is None or self.static_graph:
            super()._match_all_reduce_for_bwd_pass()
        else:
            self._in_place.shadow(self._counts_ranks())

    def _match_unused_params_allreduce(self):
        # The shadow of what is reduced in place has done that.
        if self._in_place is None or self.static_graph:
            super()._match_unused_params_allreduce()

    def register_comm_hook(self, state, hook):
        self._check_takes_hook()
        is_local = hook is post_localSGD_hook and type(state) is PostLocalSGDState
        group = state.process_group if is_local else state
        is_own = (dist.group.WORLD if group is None else group) is self.process_group
        self._prepare_for_hook(hook, is_own and any(hook is known for known in _HOOKS))
        is_told = is_local and self._in_place is not None
        registered = told_hooks.post_local_sgd if is_told else hook
        super().register_comm_hook(state, registered)
        self._follow_hook(hook, lambda reducer: dist._register_comm_hook(reducer, state, registered))
        if is_told:
            self._in_place.tell_hook()
            self._local_sgd, self._summed_in = state, self.process_group
            self._follow_local_sgd()

    def _register_builtin_comm_hook(self, comm_hook_type):
        self._check_takes_hook()
        self._prepare_for_hook(comm_hook_type, comm_hook_type in _HOOKS)
        super()._register_builtin_comm_hook(comm_hook_type)
        self._follow_hook(comm_hook_type, lambda reducer: dist._register_builtin_comm_hook(reducer, comm_hook_type))

    def _check_takes_hook(self):
        if self._types is not None and not self._types.is_reduced_as_it_is(self._reduced):
            raise RuntimeError(
                f"mixed_precision reduces gradients in {self._types.reduce}: communication hooks, and optimizers in backward, need the parameters' "
                "own type as its reduce_dtype"
            )

    def _prepare_for_hook(self, hook, is_known):
        """Leaves gradients to torch's Reducer where they cannot be reduced in place as the hook does."""
        if self._in_place is None:
            return
        self._in_place.check_finished()
        # Complex numbers would be sent as real ones.
        loses_parts = is_known and _HOOKS[hook] is not None and any(parameter.is_complex() for parameter in self._reduced)
        if not is_known or loses_parts:
            self._leave_to_torch()

    def _follow_hook(self, hook, register):
        if self._in_place is not None:
            self._register_hook = register
            self._in_place.follow_hook(_HOOKS[hook])

    def _follow_local_sgd(self):
        """Has gradients summed up in the group in which post_localSGD_hook would do so now."""
        state = self._local_sgd
        if self._in_place is None or state is None:
            return
        from . import _backend

        is_local = state.iter >= state.start_localSGD_iter
        sums = not is_local or state.post_local_gradient_allreduce
        group = (state.subgroup if is_local else self.process_group) if sums else None
        if sums and not self._shares_memory(group):
            self._leave_to_torch()
        elif group is not self._summed_in:
            self._in_place.sum_in(_backend(group) if sums else None)
            self._summed_in = group

    def _shares_memory(self, group):
        """Whether the group can reduce what lies in the process group's shared memory."""
        from . import _backend

        if group is self.process_group or group is self._summed_in:
            return True
        backend = _backend(group) if isinstance(group, dist.ProcessGroup) else None
        own = _backend(self.process_group).allocate_tensor(1, dtype=torch.float32, device=torch.device("cpu"))
        return backend is not None and backend.is_shared(own)

    def _delayed_all_reduce_hook(self, grad):
        # In torch's class buckets that come later in the same group are waited for, and this with them.
        buffer = self._delay_grad_buffer.div_(dist.get_world_size(self.process_group))
        work = dist.all_reduce(buffer, group=self.process_group, async_op=True)
        torch.autograd.Variable._execution_engine.queue_callback(work.wait)
        return grad

    def _setup_in_backward_optimizers(self):
        optimized = [own for own in self._reduced if hasattr(own, "_in_backward_optimizers")]
        if optimized:
            self._check_takes_hook()
        if self._in_place is None or not optimized:
            super()._setup_in_backward_optimizers()
            return
        # The import takes long, and is made by now.
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        # Torch's hook is for GPUs.
        for own in optimized:
            for handle in param_to_optim_hook_handle_map.get(own, []):
                handle.remove()
        reference = weakref.ref(self)

        def register(reducer):
            dist._register_comm_hook(reducer, reference, told_hooks.step_in_backward)
            reducer._set_optimizer_in_backward()

        super().register_comm_hook(reference, told_hooks.step_in_backward)
        self.reducer._set_optimizer_in_backward()
        self._register_hook = register
        self._in_place.tell_hook()

    def _check_comm_hook(self, hook):
        # For bfloat16 torch's class wants NCCL.
        if hook is not default_hooks.bf16_compress_hook or not self._is_over_flow():
            super()._check_comm_hook(hook)

    if hasattr(parallel.DistributedDataParallel, "require_manual_backward_finalization"):  # since PyTorch 2.15

        @property
        def require_manual_backward_finalization(self):
            return super().require_manual_backward_finalization

        @require_manual_backward_finalization.setter
        def require_manual_backward_finalization(self, required):
            if required:
                self._leave_to_torch()
            parallel.DistributedDataParallel.require_manual_backward_finalization.fset(self, required)

    def _remove_autograd_hooks(self):
        self._in_place = None
        super()._remove_autograd_hooks()

    def _check_reducer_finalized(self):
        if self._in_place is not None:
            self._in_place.check_finished()
        super()._check_reducer_finalized()

    def _update_process_group(self, new_process_group):
        self._leave_to_torch()
        super()._update_process_group(new_process_group)

    def stats(self):
        """Times and bytes of the last backward that reduced gradients in place, as `Ddp::stats` of Flow's Rust crates has them: `backwards`,
        `buckets` with `bytes`, `parameters` and `in_place`, and in seconds `ready_at`, `ready_to_done` and `behind_backward`; in seconds
        `backward` and `exposed`; `hidden()`. None where torch's Reducer does everything."""
        return None if self._in_place is None else self._in_place.stats()

    def _get_ddp_logging_data(self):
        data = super()._get_ddp_logging_data()
        if self._in_place is not None:
            data["in_place_bytes"] = self._in_place.in_place_bytes()
        return data

    def __getstate__(self):
        state = super().__getstate__()
        for name in "_in_place", "_register_hook", "_local_sgd", "_summed_in", "_reduced", "_ignored", "_parts", "_frozen":
            state.pop(name, None)
        return state
