// Rust closures that change gradients on their way.

#include "shim.hpp"

#include <memory>

#include <ATen/ATen.h>

using flow::guarded;

namespace {

// `result` stays null if the gradient is to stay as it is.
struct GradientClosure {
    void* data;
    char* (*call)(void* data, const at::Tensor* gradient, at::Tensor** result);
    void (*drop)(void* data);
};

void drop(GradientClosure* closure) {
    closure->drop(closure->data);
    delete closure;
}

}  // namespace

extern "C" {

// Calls the closure with each gradient that comes back to the tensor in a backward. What it returns
// goes on instead. The closure is dropped with the operation that computed the tensor.
char* flow_map_gradient(const at::Tensor* tensor, GradientClosure closure) {
    const std::shared_ptr<GradientClosure> owned(new GradientClosure(closure), drop);
    return guarded([&] {
        tensor->register_hook([owned](const at::Tensor& gradient) -> at::Tensor {
            if (!gradient.defined()) return gradient;
            at::Tensor* result = nullptr;
            flow::check(owned->call(owned->data, &gradient, &result));
            const std::unique_ptr<at::Tensor> owner(result);
            return owner ? *owner : gradient;
        });
    });
}

}  // extern "C"
