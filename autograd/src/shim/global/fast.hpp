// An operation that is known: one of the same key was dispatched before.

#pragma once

#include <torch/library.h>

#include "key.hpp"

namespace flow::global {

// One on its way.
struct FastCall {
    Key key;

    explicit FastCall(const OpInfo& info) : key(info) {}
    FastCall(const FastCall&) = delete;
    FastCall& operator=(const FastCall&) = delete;

    // Has it run with this list, which lives until then.
    virtual void set_integers(size_t argument, c10::IntArrayRef values) = 0;
    // Runs it on the locals of its inputs. The caller gets the arguments that it has written.
    virtual void run_fast() = 0;
    // Makes result `index`, which it has not written, a global tensor.
    virtual void give(size_t index, const OutputView& output) = 0;

protected:
    ~FastCall() = default;
};

struct FastCallView {
    FastCall* call;
    const uint64_t* key;
    size_t key_count;
    const void* spec;  // of the first global tensor
};

// Runs the operation if Rust knows it.
bool run_if_known(FastCall& call);

// The tensor, in an order of its elements of which there is a view of these sizes.
at::Tensor viewable(const at::Tensor& local, c10::IntArrayRef sizes);

// What is on below the kernels: neither autograd nor they themselves.
inline const auto BELOW = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::DispatchKeySet(KEY);

// The unboxed kernel of an operator that has one: of those that training runs most often.
std::optional<torch::CppFunction> unboxed_kernel(const std::string& name);

}  // namespace flow::global
