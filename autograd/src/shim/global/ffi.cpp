// What Rust does with an operation.

#include <algorithm>
#include <string_view>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "../shim.hpp"
#include "call.hpp"

using c10::IValue;
using flow::guarded;
using namespace flow::global;
using torch::jit::Stack;

extern "C" {

// Runs the operation with this list, which lives until then. Before `flow_fast_run`.
char* flow_fast_set_integers(FastCall* call, size_t argument, const int64_t* values, size_t count) {
    return guarded([&] { call->set_integers(argument, {values, count}); });
}

// Runs the operation on the locals of its inputs, and gives the caller the arguments that it has
// written.
char* flow_fast_run(FastCall* call) {
    return guarded([&] { call->run_fast(); });
}

// Makes result `index` of that, which the operation has not written, a global tensor.
char* flow_fast_output(FastCall* call, size_t index, OutputView output) {
    return guarded([&] { call->give(index, output); });
}

// Runs the operation on this instead of the tensor's own local.
char* flow_call_set_local(Call* call, size_t index, const at::Tensor* local) {
    return guarded([&] { call->locals[index] = local ? *local : at::Tensor(); });
}

// What the operation runs on as this tensor.
at::Tensor* flow_call_local(const Call* call, size_t index) {
    return call->locals[index].defined() ? new at::Tensor(call->locals[index]) : nullptr;
}

// Runs the operation with this list.
char* flow_call_set_integers(Call* call, size_t argument, const int64_t* values, size_t count) {
    return guarded([&] {
        call->lists.emplace_back(values, values + count);
        call->arguments[argument].integers = call->lists.back().data();
        call->arguments[argument].count = static_cast<uint32_t>(count);
    });
}

char* flow_call_run(Call* call) {
    return guarded([&] { call->run(); });
}

// A result: visits its tensors, also an undefined one; or it is a number.
char* flow_call_result(const Call* call, size_t index, void* data, void (*visit)(void* data, const at::Tensor* tensor), bool* is_list,
                       ScalarView* scalar) {
    return guarded([&] {
        TORCH_CHECK(index < call->results.size(), call->op.schema().name(), " was not run on the locals");
        const auto& result = call->results[index];
        *is_list = result.isTensorList();
        *scalar = {NONE, 0, 0.0};
        if (result.isTensor()) visit(data, &result.toTensor());
        else if (result.isNone()) visit(data, &UNDEFINED);
        else if (*is_list) for (const at::Tensor& tensor : result.toTensorVector()) visit(data, &tensor);
        else if (result.isInt()) *scalar = {INT, result.toInt(), 0.0};
        else if (result.isDouble()) *scalar = {FLOAT, 0, result.toDouble()};
        else if (result.isBool()) *scalar = {BOOL, result.toBool(), 0.0};
        else TORCH_CHECK(false, call->op.schema().name(), " returns a ", result.tagKind(), ", which no global tensor can be");
    });
}

// Runs the operation on tensors of the logical sizes that have no elements: `flow_call_result` has what it
// gives. Not known if libtorch has no kernel for such tensors.
char* flow_call_run_on_meta(Call* call, bool* is_known) {
    *is_known = false;
    return guarded([&] {
        if (!call->op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return;
        c10::SmallVector<at::Tensor, 8> stubs;
        for (const auto& view : call->tensors) {
            stubs.push_back(view.defined ? at::empty_strided(view.tensor->sizes(), view.tensor->strides(), view.tensor->options().device(c10::kMeta)) : UNDEFINED);
        }
        if (call->info.wants_viewable) stubs[0] = viewable(stubs[0], c10::IntArrayRef(call->arguments[1].integers, call->arguments[1].count));
        Stack stack = call->arguments_with(stubs);
        // Neither a device nor a generator is that of such tensors.
        if (std::any_of(stack.begin(), stack.end(), [](const IValue& value) { return value.isDevice() || value.isGenerator(); })) return;
        c10::WarningUtils::WarningHandlerGuard quiet(&QUIET);
        try {
            call->op.callBoxed(&stack);
        } catch (const c10::NotImplementedError&) {
            return;
        } catch (const c10::Error& error) {
            // The dispatcher has a kernel, and that has none for the device.
            if (std::string_view(error.what_without_backtrace()).find("DispatchStub") == std::string_view::npos) throw;
            return;
        }
        call->results.assign(std::make_move_iterator(stack.begin()), std::make_move_iterator(stack.end()));
        *is_known = true;
    });
}

// Runs an operation that draws random numbers on CPU tensors without elements, with a generator of its own: for what it says of its
// other arguments.
char* flow_call_check_arguments(const Call* call) {
    return guarded([&] {
        const auto generator = call->op.schema().argumentIndexWithName("generator");
        if (!generator) return;
        c10::SmallVector<at::Tensor, 8> empty;
        for (const auto& view : call->tensors) {
            empty.push_back(view.defined ? at::empty({0}, view.tensor->options().device(at::kCPU)) : UNDEFINED);
        }
        Stack stack = call->arguments_with(empty);
        stack[*generator] = at::detail::createCPUGenerator();
        call->op.callBoxed(&stack);
    });
}

// Gives the caller result `index` as a global tensor; a number as it is.
char* flow_call_output(Call* call, size_t index, OutputView output) {
    return guarded([&] { call->outputs.push_back(global_result(call->results[index], output)); });
}

// Gives the caller a tensor that Rust made.
char* flow_call_output_tensor(Call* call, const at::Tensor* tensor) {
    return guarded([&] { call->outputs.emplace_back(tensor ? *tensor : at::Tensor()); });
}

char* flow_call_output_tensors(Call* call, const at::Tensor* const* tensors, size_t count) {
    return guarded([&] {
        c10::List<at::Tensor> list;
        for (size_t i = 0; i < count; ++i) list.push_back(*tensors[i]);
        call->outputs.emplace_back(std::move(list));
    });
}

// Gives the caller the argument that the operation has written. If the operation has reshaped it,
// result `index` is its local now.
char* flow_call_output_written(Call* call, size_t index) {
    return guarded([&] {
        const int written = call->info.writes[index];
        TORCH_CHECK(written >= 0, "result ", index, " is no argument that was written");
        call->outputs.push_back(call->value(written));
    });
}

// Visits the tensors that the caller gets as result `index`, also an undefined one.
void flow_call_returned(const Call* call, size_t index, void* data, void (*visit)(void* data, const at::Tensor* tensor)) {
    if (index >= call->outputs.size()) return;
    const auto& output = call->outputs[index];
    if (output.isTensor()) visit(data, &output.toTensor());
    else if (output.isTensorList()) for (const at::Tensor& tensor : output.toTensorVector()) visit(data, &tensor);
}

// The number of the node that autograd runs on this thread; of the last one that it has made, if it
// runs none and `is_made`. False if there is neither.
bool flow_autograd_node(bool is_made, uint64_t* number, bool* is_backward) {
    const auto node = torch::autograd::get_current_node();
    *is_backward = node != nullptr;
    *number = node ? node->sequence_nr() : at::sequence_number::peek() - 1;
    return node || is_made;
}

// Whether autograd notes operations on this thread.
bool flow_grad_mode() { return at::GradMode::is_enabled(); }

// The argument that result `index` is, or -1.
int flow_call_writes(const Call* call, size_t index) { return call->info.writes[index]; }

char* flow_call_output_scalar(Call* call, ScalarView scalar) {
    return guarded([&] {
        if (scalar.tag == INT) call->outputs.emplace_back(scalar.integer);
        else if (scalar.tag == BOOL) call->outputs.emplace_back(scalar.integer != 0);
        else call->outputs.emplace_back(scalar.number);
    });
}

}  // extern "C"
