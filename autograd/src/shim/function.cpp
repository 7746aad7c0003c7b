// Operations whose forward and backward are Rust closures.

#include "replace.hpp"
#include "shim.hpp"

#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/custom_function.h>

namespace autograd = torch::autograd;
using autograd::variable_list;
using flow::TensorSlice;
using flow::guarded;

namespace {

struct BoolSlice {
    const bool* values;
    size_t count;
};

// The forward reads the inputs, and pushes the outputs to `results` and what backward needs to
// `saved`. The backward reads the saved tensors and the gradients of the outputs, and pushes the
// gradients of the inputs to `results`; `needed` then says, for each input, whether its gradient is.
struct FunctionClosure {
    void* data;
    char* (*call)(void* data, TensorSlice first, TensorSlice second, variable_list* results,
                  variable_list* saved, BoolSlice needed);
    void (*drop)(void* data);
};

// Keeps a backward closure for as long as its node lives.
struct Backward final : torch::CustomClassHolder {
    explicit Backward(FunctionClosure closure) : closure(closure) {}
    Backward(const Backward&) = delete;
    Backward& operator=(const Backward&) = delete;
    ~Backward() override { closure.drop(closure.data); }

    const FunctionClosure closure;
};

variable_list run(const FunctionClosure& closure, const variable_list& first,
                  const variable_list& second, variable_list* saved, BoolSlice needed) {
    const auto pointers = [](const variable_list& tensors) {
        std::vector<const at::Tensor*> pointers;
        for (const auto& tensor : tensors) {
            pointers.push_back(tensor.defined() ? &tensor : nullptr);
        }
        return pointers;
    };
    const auto a = pointers(first), b = pointers(second);
    variable_list results;
    flow::check(closure.call(closure.data, {a.data(), a.size()}, {b.data(), b.size()}, &results,
                             saved, needed));
    return results;
}

struct Call {
    FunctionClosure forward;
    c10::intrusive_ptr<Backward> backward;
};

constexpr auto BACKWARD = "backward", HAS_SAVED = "has_saved", INPUTS = "inputs";

struct RustFunction final : autograd::Function<RustFunction> {
    static variable_list forward(autograd::AutogradContext* context, at::TensorList inputs,
                                 const Call* call) {
        variable_list saved;
        auto outputs = run(call->forward, inputs.vec(), {}, &saved, {});
        context->set_materialize_grads(false);
        context->saved_data[BACKWARD] = c10::IValue::make_capsule(call->backward);
        context->saved_data[HAS_SAVED] = !saved.empty();
        context->saved_data[INPUTS] = static_cast<int64_t>(inputs.size());
        context->save_for_backward(std::move(saved));
        return outputs;
    }

    static variable_list backward(autograd::AutogradContext* context, variable_list grads) {
        const auto holder = context->saved_data[BACKWARD].toCapsule();
        const auto& closure = static_cast<const Backward&>(*holder).closure;
        // Without saved tensors backward may run again even if the graph is not retained, as in
        // Python.
        const bool has_saved = context->saved_data[HAS_SAVED].toBool();
        const auto saved = has_saved ? context->get_saved_variables() : variable_list();
        const auto inputs = static_cast<size_t>(context->saved_data[INPUTS].toInt());
        const auto needed = std::make_unique<bool[]>(inputs);
        for (size_t i = 0; i < inputs; ++i) needed[i] = context->needs_input_grad(i);
        auto results = run(closure, saved, grads, nullptr, {needed.get(), inputs});
        TORCH_CHECK(results.size() == inputs, "the backward of a custom function returned ",
                    results.size(), " gradients for ", inputs, " inputs");
        results.emplace_back();  // for `call`
        return results;
    }
};

}  // namespace

extern "C" {

// Appends a copy of the handle, or an undefined tensor if null, to what a closure returns.
char* flow_push_tensor(variable_list* tensors, const at::Tensor* tensor) {
    return guarded([&] { tensors->push_back(tensor ? *tensor : at::Tensor()); });
}

// Whether operations on this thread record a graph.
bool flow_grad_enabled() {
    return at::GradMode::is_enabled();
}

// Runs `forward` on the inputs, without a graph inside, and appends its outputs to `outputs` by
// `push`, which owns the tensor that it gets. Backward through them calls `backward`.
char* flow_apply_function(TensorSlice inputs, FunctionClosure forward, FunctionClosure backward,
                          void* outputs, void (*push)(void* outputs, at::Tensor* tensor)) {
    return guarded([&] {
        const Call call{forward, c10::make_intrusive<Backward>(backward)};
        variable_list variables;
        for (size_t i = 0; i < inputs.count; ++i) variables.push_back(flow::replaced(*inputs.tensors[i]));
        for (auto& output : RustFunction::apply(at::TensorList(variables), &call)) {
            push(outputs, new at::Tensor(std::move(output)));
        }
    });
}

}  // extern "C"
