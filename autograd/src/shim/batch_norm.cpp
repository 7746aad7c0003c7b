// Batch norms whose training is computed by Rust.

#include "shim.hpp"

#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <ATen/ops/batch_norm_native.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

namespace autograd = torch::autograd;
using flow::guarded;

namespace {

// A batch norm in training. Null stands for a tensor that it does not have.
struct BatchNormView {
    const at::Tensor *input, *weight, *bias, *running_mean, *running_var;
    double momentum, eps;
};

struct BatchNormClosure {
    void* data;
    char* (*call)(void* data, const BatchNormView* norm, at::Tensor** result);
    void (*drop)(void* data);
};

// Keeps a closure at a running mean, for as long as that tensor lives, whatever memory it gets. As a
// hook of a gradient, which a running mean never has, it is not called.
class BatchNormHook final : public autograd::PostAccumulateGradHook {
public:
    explicit BatchNormHook(BatchNormClosure closure) : closure(closure) {}
    BatchNormHook(const BatchNormHook&) = delete;
    BatchNormHook& operator=(const BatchNormHook&) = delete;
    ~BatchNormHook() override { closure.drop(closure.data); }

    void operator()(const at::Tensor&) override {}

    const BatchNormClosure closure;
};

const BatchNormHook* batch_norm_hook(const std::optional<at::Tensor>& running_mean) {
    if (!running_mean || !running_mean->defined()) return nullptr;
    if (!autograd::impl::get_autograd_meta(*running_mean)) return nullptr;
    return dynamic_cast<const BatchNormHook*>(autograd::impl::post_acc_grad_hooks(*running_mean).get());
}

at::Tensor batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
                      const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var, bool training, double momentum,
                      double eps, bool cudnn_enabled) {
    const auto hook = training ? batch_norm_hook(running_mean) : nullptr;
    if (!hook) return at::native::batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled);
    const auto pointer = [](const std::optional<at::Tensor>& tensor) { return tensor && tensor->defined() ? &*tensor : nullptr; };
    const BatchNormView norm{&input, pointer(weight), pointer(bias), pointer(running_mean), pointer(running_var), momentum, eps};
    at::Tensor* result = nullptr;
    flow::check(hook->closure.call(hook->closure.data, &norm, &result));
    return *std::unique_ptr<at::Tensor>(result);
}

// Has libtorch call `batch_norm` where it would call its own. Both are composed of operations with
// gradients.
void register_batch_norm() {
    static std::once_flag once;
    std::call_once(once, [] {
        for (const auto key : {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA}) {
            static_cast<void>((new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__))->impl("batch_norm", TORCH_FN(batch_norm)));
        }
    });
}

}  // namespace

extern "C" {

// Has the closure compute the batch norms in training that have this running mean.
char* flow_replace_batch_norm(const at::Tensor* running_mean, BatchNormClosure closure) {
    return guarded([&] {
        auto hook = std::make_unique<BatchNormHook>(closure);
        TORCH_CHECK(running_mean->defined() && !running_mean->requires_grad(), "a running mean is a tensor that requires no gradient");
        register_batch_norm();
        autograd::impl::set_post_acc_grad_hooks(*running_mean, std::move(hook));
    });
}

// Whether a closure computes the batch norms that have this running mean.
bool flow_replaces_batch_norm(const at::Tensor* running_mean) { return batch_norm_hook(*running_mean) != nullptr; }

// The gradients of a weight and of a bias where the normalization had this mean and variance:
// libtorch's kernel, which its Rust interface lacks.
char* flow_batch_norm_sums(const at::Tensor* gradient, const at::Tensor* input, const at::Tensor* mean, const at::Tensor* variance, double eps,
                           at::Tensor** of_weight, at::Tensor** of_bias) {
    return guarded([&] {
        // The kernel for GPUs asks for a weight, and for what a forward has saved, of which nothing stands for "as in evaluation".
        const auto weight = at::ones_like(*mean);
        const auto saved = at::empty({0}, mean->options());
        auto sums = at::native_batch_norm_backward(*gradient, *input, weight, *mean, *variance, saved, saved, false, eps, {false, true, true});
        *of_weight = new at::Tensor(std::move(std::get<1>(sums)));
        *of_bias = new at::Tensor(std::move(std::get<2>(sums)));
    });
}

}  // extern "C"
