// What flow-autograd needs of libtorch's C++ interface, as plain C functions.
//
// Functions that can fail return the error's text, to be freed with free(), or null. No exception
// leaves these files except into libtorch's engine, and Rust code never unwinds into them: Rust
// callbacks return their error's text the same way. The types of pointers to autograd nodes differ
// between the libtorch versions we support: leave them to `auto`.

#pragma once

#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

#include <ATen/core/Tensor.h>

namespace flow {

// A Rust closure. Whoever gets one owns it, and calls `drop` once.
struct Closure {
    void* data;
    char* (*call)(void* data, const at::Tensor* argument);
    void (*drop)(void* data);
};

// Tensors that Rust hands over for a call. Null stands for an undefined one.
struct TensorSlice {
    const at::Tensor* const* tensors;
    size_t count;
};

// Throws the error that Rust returned, if any.
inline void check(char* text) {
    if (!text) return;
    const std::string message(text);
    std::free(text);
    throw std::runtime_error(message);
}

// Calls the closure and throws the error it returns.
inline void call(const Closure& closure, const at::Tensor* argument) {
    check(closure.call(closure.data, argument));
}

// Runs `body` and returns the text of what it throws.
template <typename Body>
char* guarded(Body&& body) noexcept {
    try {
        body();
        return nullptr;
    } catch (const c10::Error& error) {
        return strdup(error.what_without_backtrace());
    } catch (const std::exception& error) {
        return strdup(error.what());
    } catch (...) {
        return strdup("an unknown C++ exception");
    }
}

// Frees the Rust value behind `owner`.
using DropOwner = void (*)(void* owner);

// An error that begins with `name`, if the tensor's elements do not lie in plain memory of the CPU
// or a GPU.
inline void check_plain(const at::Tensor& tensor, const std::string& name) {
    TORCH_CHECK(tensor.defined(), name, "is undefined: it must have a shape and elements");
    TORCH_CHECK(!tensor.is_nested(), name, "is nested: pad it, or use its parts");
    TORCH_CHECK(tensor.layout() == c10::kStrided, name, "has the layout ", tensor.layout(), ": make it dense by to_dense()");
    TORCH_CHECK(tensor.is_cpu() || tensor.is_cuda(), name, "is on ", tensor.device(), ": it must be on the CPU or a GPU");
    TORCH_CHECK(!tensor.is_quantized(), name, "is quantized: make it an ordinary tensor by dequantize()");
    TORCH_CHECK(tensor.has_storage(), name, "has no memory");
}

}  // namespace flow
