#include "call.hpp"

#include <utility>

#include <ATen/ATen.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/headeronly/version.h>
#include <torch/library.h>

#include "../hooks.hpp"
#include "../shim.hpp"

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using flow::guarded;
using namespace flow::global;
using torch::jit::Stack;

Call::Call(const c10::OperatorHandle& op, const OpInfo& info, Stack& stack)
    : FastCall(info), op(op), info(info), stack(stack), first(stack.size() - info.argument_count), count(info.argument_count) {
    for (size_t i = 0; i < count; ++i) key.add(value(i), info.is_optional_tensor[i]);
}

CallView Call::view() {
    for (size_t i = 0; i < count; ++i) add(i);
    size_t next = 0;
    for (auto& argument : arguments) {
        if (argument.tag == INTS) argument.integers = lists[next++].data();
    }
    const auto& schema = op.schema();
    return {this, key.words.data(), key.words.size(), schema.name().c_str(), schema.overload_name().c_str(), arguments.data(), tensors.data(), count, tensors.size(),
            info.writes.size(), info.is_view, info.reshapes, info.is_random, info.is_dynamic, info.gives_tensors, grad_mode};
}

namespace {

// A list of tensors, each as `local` makes it.
template <typename Local>
IValue list_of(const IValue& list, const Local& local) {
    if (list.isTensorList()) {
        c10::List<at::Tensor> items;
        for (const auto& item : list.toListRef()) items.push_back(local(item.toTensor()));
        return items;
    }
    c10::List<std::optional<at::Tensor>> items;
    for (const auto& item : list.toListRef()) items.push_back(item.isNone() ? std::nullopt : std::optional(local(item.toTensor())));
    return items;
}

}  // namespace

at::Tensor flow::global::viewable(const at::Tensor& local, c10::IntArrayRef sizes) {
    const auto known = at::infer_size_dv(sizes, local.numel());
    return at::detail::computeStride(local.sizes(), local.strides(), known) ? local : local.contiguous();
}

IValue flow::global::global_result(IValue result, const OutputView& output) {
    if (result.isTensor() && result.toTensor().defined()) return wrap_result(std::move(result).toTensor(), output);
    if (!result.isTensorList()) return result;
    c10::List<at::Tensor> list;
    for (const at::Tensor& local : result.toTensorVector()) list.push_back(wrap_result(local, output));
    return list;
}

void Call::set_integers(size_t argument, c10::IntArrayRef values) {
    TORCH_CHECK(!has_run() && argument < count, "the call has no argument ", argument);
    value(argument) = c10::List<int64_t>(values);
}

void Call::give(size_t index, const OutputView& output) {
    TORCH_CHECK(has_run() && first + index < stack.size(), "the call has no result ", index);
    value(index) = global_result(std::move(value(index)), output);
}

void Call::run_fast() {
    TORCH_CHECK(!has_run(), op.schema().name(), ": was run before");
    const auto local = [](const at::Tensor& tensor) { return is_global(tensor) ? meta_of(tensor).local : tensor; };
    own.resize(count);
    for (size_t i = 0; i < count; ++i) {
        auto& value = this->value(i);
        if (value.isTensor()) {
            if (!is_global(value.toTensor())) continue;
            own[i] = std::move(value);
            value = meta_of(own[i].toTensor()).local;
        } else if (value.isTensorList() || value.isOptionalTensorList()) {
            own[i] = std::move(value);
            value = list_of(own[i], local);
        }
    }
    if (info.wants_viewable) value(0) = viewable(value(0).toTensor(), value(1).toIntVector());
    op.callBoxed(&stack);
    for (size_t i = 0; i < info.writes.size(); ++i) {
        const int written = info.writes[i];
        if (written >= 0 && !own[written].isNone()) value(i) = own[written];
    }
}

void Call::add(size_t index) {
    const auto& value = this->value(index);
    Argument argument{};
    argument.first = static_cast<uint32_t>(tensors.size());
    argument.written = info.is_written[index];
    argument.out = info.is_out[index];
    if (value.isTensor() || (value.isNone() && info.is_optional_tensor[index])) {
        const at::Tensor& tensor = value.isNone() ? UNDEFINED : value.toTensor();
        argument.tag = tensor.defined() ? TENSOR : NONE;
        argument.count = 1;
        add(tensor);
    } else if (value.isNone()) {
        argument.tag = NONE;
    } else if (value.isInt()) {
        argument.tag = INT;
        argument.integer = value.toInt();
    } else if (value.isDouble()) {
        argument.tag = FLOAT;
        argument.number = value.toDouble();
    } else if (value.isBool()) {
        argument.tag = BOOL;
        argument.integer = value.toBool();
    } else if (value.isIntList()) {
        lists.push_back(value.toIntVector());
        argument.tag = INTS;
        argument.count = static_cast<uint32_t>(lists.back().size());
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
        const auto list = value.toListRef();
        argument.tag = TENSORS;
        argument.count = static_cast<uint32_t>(list.size());
        for (const auto& item : list) add(item.isNone() ? UNDEFINED : item.toTensor());
    } else {
        argument.tag = OTHER;
    }
    arguments.push_back(argument);
}

void Call::add(const at::Tensor& tensor) {
    TensorView view{};
    view.tensor = &tensor;
    view.defined = tensor.defined();
    if (view.defined) {
        view.sizes = tensor.sizes().data();
        view.strides = tensor.strides().data();
        view.dims = static_cast<int32_t>(tensor.dim());
        view.kind = static_cast<int8_t>(tensor.scalar_type());
    }
    if (is_global(tensor)) {
        const auto& meta = meta_of(tensor);
        view.spec = meta.spec;
        view.detached_view = meta.detached_view;
        locals.push_back(meta.local);
    } else {
        locals.push_back(tensor);
    }
    tensors.push_back(view);
}

Stack Call::arguments_with(c10::ArrayRef<at::Tensor> with) const {
    Stack copy;
    for (size_t i = 0; i < count; ++i) {
        const auto& argument = arguments[i];
        const auto items = with.slice(argument.first, argument.tag == TENSORS ? argument.count : 0);
        if (argument.tag == TENSOR) {
            copy.emplace_back(with[argument.first]);
        } else if (argument.tag == TENSORS && value(i).isTensorList()) {
            copy.emplace_back(c10::List<at::Tensor>(items));
        } else if (argument.tag == TENSORS) {
            c10::List<std::optional<at::Tensor>> list;
            for (const auto& item : items) list.push_back(item.defined() ? std::optional(item) : std::nullopt);
            copy.emplace_back(std::move(list));
        } else if (argument.tag == INTS) {
            copy.emplace_back(c10::List<int64_t>(c10::IntArrayRef(argument.integers, argument.count)));
        } else {
            copy.push_back(value(i));
        }
    }
    return copy;
}

void Call::run() {
    if (info.wants_viewable) {
        locals[0] = viewable(locals[0], c10::IntArrayRef(arguments[1].integers, arguments[1].count));
    }
    Stack local = arguments_with(locals);
    at::AutoGradMode as_called(grad_mode);
    op.callBoxed(&local);
    results.assign(std::make_move_iterator(local.begin()), std::make_move_iterator(local.end()));
}

bool flow::global::run_if_known(FastCall& call) {
    const FastCallView view{&call, call.key.words.data(), call.key.words.size(), call.key.spec};
    bool done = false;
    flow::check(callbacks.fast(&view, &done));
    return done;
}

void flow::global::kernel(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
    // Views are replayed in backward: as_strided would need the logical memory.
    c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
    const auto& info = info_of(op);
    if (info.is_composite) {
        // These come here only without autograd (inference mode): take them apart.
        c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
        op.callBoxedForDispatchKey(DispatchKey::CompositeImplicitAutograd, *stack);
        return;
    }
    c10::impl::ExcludeDispatchKeyGuard below(BELOW);
    Call call(op, info, *stack);
    if (!call.key.spec) {
        op.callBoxed(stack);
        return;
    }
    if (run_if_known(call)) return;
    TORCH_CHECK(!call.has_run(), op.schema().name(), ": was run, and is to be dispatched again");
    const auto view = call.view();
    flow::check(callbacks.dispatch(&view));
    TORCH_CHECK(call.outputs.size() == view.return_count, op.schema().name(), ": its rule gave ", call.outputs.size(), " results");
    torch::jit::drop(*stack, call.count);
    for (auto& output : call.outputs) stack->push_back(std::move(output));
}

Quiet flow::global::QUIET;

extern "C" {

// Registers the kernel for all of libtorch's operators. Once in a process.
char* flow_global_register(Callbacks functions) {
    return guarded([&] {
        TORCH_CHECK(TORCH_VERSION_MAJOR == 2 && (TORCH_VERSION_MINOR == 11 || TORCH_VERSION_MINOR == 13),
                    "global tensors know libtorch 2.11 and 2.13, and this is " TORCH_VERSION);
        callbacks = functions;
        static auto* library = new torch::Library(torch::Library::IMPL, "aten", KEY, __FILE__, __LINE__);
        auto& dispatcher = c10::Dispatcher::singleton();
        // libtorch warns that two kernels of functorch's are replaced: they serve a mode that no global
        // tensor is used in.
        c10::WarningUtils::WarningHandlerGuard guard(&QUIET);
        for (const auto& name : dispatcher.getAllOpNames()) {
            if (name.name.rfind("aten::", 0) != 0 || !dispatcher.findSchema(name)) continue;
            const auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
            auto unboxed = unboxed_kernel(full);
            library->impl(full.c_str(), unboxed ? std::move(*unboxed) : torch::CppFunction::makeFromBoxedFunction<&kernel>());
        }
    });
}

// Carries out the operation with these global tensors as a call of its own, whose results the caller
// gets.
char* flow_call_run_with(Call* call, const at::Tensor* const* tensors, size_t count) {
    return guarded([&] {
        c10::SmallVector<at::Tensor, 8> with;
        for (size_t i = 0; i < count; ++i) with.push_back(tensors[i] ? *tensors[i] : UNDEFINED);
        Stack stack = call->arguments_with(with);
        kernel(call->op, DispatchKeySet(), &stack);
        call->outputs.assign(std::make_move_iterator(stack.begin()), std::make_move_iterator(stack.end()));
    });
}

}  // extern "C"
