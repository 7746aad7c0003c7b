// An operation on global tensors, on its way to Rust and back.

#pragma once

#include <vector>

#include <ATen/core/stack.h>

#include "schema.hpp"
#include "tensor.hpp"

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

enum Tag : uint8_t { NONE, TENSOR, TENSORS, INT, FLOAT, BOOL, INTS, OTHER };

struct Argument {
    int64_t integer;
    double number;
    const int64_t* integers;
    uint32_t first, count;  // of tensors, or the length of a list
    Tag tag;
    bool written;
};

struct ScalarView {
    Tag tag;
    int64_t integer;
    double number;
};

struct Call;

// What an operation is known by, once it was dispatched.
struct FastView {
    Call* call;
    // What decides how an operation is carried out: the operator, kinds, sizes and specs of tensors
    // (and strides, for views), and arguments. Of numbers with a fraction only whether they are zero.
    const uint64_t* key;
    size_t key_count;
    const void* spec;  // of the first global tensor
};

struct CallView {
    FastView fast;
    const char* name;
    const char* overload;
    const Argument* arguments;
    const TensorView* tensors;
    size_t argument_count, tensor_count, return_count;
    bool is_view, reshapes, is_random, is_dynamic, gives_tensors;
};

// What becomes of a result: its spec, and the logical sizes of dimensions that are split. Null
// strides: contiguous.
struct OutputView {
    const void* spec;  // given away
    const int32_t* split_dims;
    const int64_t* split_sizes;
    size_t splits;
    const int64_t* strides;
    size_t stride_count;
    bool shares, detached_view;
};

using CloneSpec = const void* (*)(const void* spec);

inline const at::Tensor UNDEFINED;

// One operation on its way.
struct Call {
    const c10::OperatorHandle& op;
    const OpInfo& info;
    torch::jit::Stack& stack;
    const size_t first, count;  // of the arguments on the stack
    c10::SmallVector<uint64_t, 64> key;
    const void* spec = nullptr;  // of the first global tensor; null if all are plain
    const bool grad_mode = at::GradMode::is_enabled();  // some kernels look at it

    Call(const c10::OperatorHandle& op, const OpInfo& info, torch::jit::Stack& stack);
    FastView fast_view() { return {this, key.data(), key.size(), spec}; }

    // Runs the operation on the locals of its inputs: the stack has the results then.
    void run_fast();
    bool has_run() const { return !own.empty(); }
    c10::SmallVector<c10::IValue, 8> own;  // arguments in whose place their locals are

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
    void add_to_key(const c10::IValue& value, bool is_optional_tensor);
    void add_to_key(const at::Tensor& tensor);
    void add(size_t index);
    void add(const at::Tensor& tensor);
};

}  // namespace flow::global
