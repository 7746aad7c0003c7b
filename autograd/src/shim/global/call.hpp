// An operation on global tensors, on its way to Rust and back.

#pragma once

#include <vector>

#include <ATen/core/stack.h>
#include <c10/util/Exception.h>

#include "fast.hpp"

namespace flow::global {

// Flat values for Rust. Strides, sizes and lists live as long as the call.
struct TensorView {
    const at::Tensor* tensor;
    const int64_t* sizes;
    const int64_t* strides;
    const void* spec;  // Rust's; null for a plain tensor
    int32_t dims;
    int8_t kind;  // c10::ScalarType
    bool defined, detached_view;
};

struct Argument {
    int64_t integer;
    double number;
    const int64_t* integers;
    uint32_t first, count;  // of tensors, or the length of a list
    Tag tag;
    bool written, out;
};

struct ScalarView {
    Tag tag;
    int64_t integer;
    double number;
};

struct Call;

struct CallView {
    Call* call;
    const uint64_t* key;
    size_t key_count;
    const char* name;
    const char* overload;
    const Argument* arguments;
    const TensorView* tensors;
    size_t argument_count, tensor_count, return_count;
    bool is_view, reshapes, is_random, is_dynamic, gives_tensors, grad_mode;
};

// One operation on its way.
struct Call final : FastCall {
    const c10::OperatorHandle& op;
    const OpInfo& info;
    torch::jit::Stack& stack;
    const size_t first, count;             // of the arguments on the stack
    c10::SmallVector<c10::IValue, 8> own;  // arguments in whose place their locals are
    const bool grad_mode = at::GradMode::is_enabled();  // some kernels look at it

    Call(const c10::OperatorHandle& op, const OpInfo& info, torch::jit::Stack& stack);

    bool has_run() const { return !own.empty(); }
    void set_integers(size_t argument, c10::IntArrayRef values) override;
    // The stack has the results then.
    void run_fast() override;
    void give(size_t index, const OutputView& output) override;

    // All that follows is there once this was called.
    CallView view();
    c10::SmallVector<Argument, 12> arguments;
    c10::SmallVector<TensorView, 8> tensors;
    c10::SmallVector<at::Tensor, 8> locals;    // by tensor: what the operation runs on
    std::vector<std::vector<int64_t>> lists;   // lists live in IValues as boxed ones: copied
    c10::SmallVector<c10::IValue, 4> results;  // of the local operation
    std::vector<c10::IValue> outputs;          // for the caller

    c10::IValue& value(size_t index) const { return stack[first + index]; }

    // The arguments, with these tensors and lists in place of the logical ones.
    torch::jit::Stack arguments_with(c10::ArrayRef<at::Tensor> with) const;

    // Runs the operation on the locals.
    void run();

private:
    void add(size_t index);
    void add(const at::Tensor& tensor);
};

// A result as a global tensor, or a list of them; a number as it is.
c10::IValue global_result(c10::IValue result, const OutputView& output);

// Leaves out libtorch's warnings.
struct Quiet final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
};
extern Quiet QUIET;

// Every operator's kernel.
void kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace flow::global
