// Rust closures that run inside `backward`.

#include "hooks.hpp"
#include "shim.hpp"

#include <memory>
#include <mutex>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

namespace autograd = torch::autograd;
using flow::call;
using flow::Closure;
using flow::guarded;

namespace {

// The last gradient that libtorch passed to a parameter to accumulate: its storage, and whether
// nothing else uses that storage.
struct Incoming {
    const c10::StorageImpl* storage = nullptr;
    bool alone = false;
};

// Fills in `Incoming` before libtorch accumulates. Later it is too late: a reference that the engine
// keeps for other nodes then looks the same as one that it is about to drop. The gradient of a global
// tensor gets the tensor's spec here.
class IncomingHook final : public autograd::FunctionPreHook {
public:
    explicit IncomingHook(const at::Tensor& leaf) : leaf_(leaf.getIntrusivePtr()), incoming(std::make_shared<Incoming>()) {}

    autograd::variable_list operator()(const autograd::variable_list& grads) override {
        *incoming = Incoming{};
        if (grads.size() != 1 || !grads[0].defined()) return grads;
        if (auto leaf = leaf_.lock()) {
            if (auto boxed = flow::boxed_gradient(at::Tensor(std::move(leaf)), grads[0])) return {std::move(*boxed)};
        }
        if (grads[0].has_storage()) {
            flow::forget_base(grads[0]);
            *incoming = {grads[0].storage().unsafeGetStorageImpl(), grads[0].storage().use_count() == 1};
        }
        return grads;
    }

private:
    const c10::weak_intrusive_ptr<c10::TensorImpl> leaf_;

public:
    const std::shared_ptr<Incoming> incoming;
};

// The hook of a leaf, made if it has none: libtorch has room for one.
const IncomingHook& incoming_hook(const at::Tensor& leaf) {
    static std::mutex adding;
    const std::lock_guard<std::mutex> guard(adding);
    for (const auto& hook : autograd::impl::hooks(leaf)) {
        if (const auto ours = dynamic_cast<const IncomingHook*>(hook.get())) return *ours;
    }
    auto hook = std::make_unique<IncomingHook>(leaf);
    const auto& added = *hook;
    autograd::impl::add_hook(leaf, std::move(hook));
    return added;
}

class GradHook final : public autograd::PostAccumulateGradHook {
public:
    GradHook(Closure closure, std::shared_ptr<Incoming> incoming) : closure_(closure), incoming_(std::move(incoming)) {}
    GradHook(const GradHook&) = delete;
    GradHook& operator=(const GradHook&) = delete;
    ~GradHook() override { closure_.drop(closure_.data); }

    void operator()(const at::Tensor& parameter) override { call(closure_, &parameter); }

    void* data() const { return closure_.data; }

    // During the hook: whether the parameter's gradient lies in memory of its own.
    bool grad_is_exclusive(const at::Tensor& parameter) const {
        const auto& grad = parameter.grad();
        if (!grad.defined() || !grad.has_storage()) return false;
        // Either what came has become the gradient as it was, or it was copied or added.
        const bool taken = grad.storage().unsafeGetStorageImpl() == incoming_->storage;
        return taken ? incoming_->alone : grad.storage().use_count() == 1;
    }

private:
    const Closure closure_;
    const std::shared_ptr<Incoming> incoming_;
};

// Calls the closure when the backward that runs on this thread is otherwise done.
//
// A backward may run inside a node of another one, as in checkpointing, and libtorch calls back at
// the end of the inner one, while that node is being evaluated. What is to be called then waits for
// the end of the outer one: it is queued anew, as that can only be done from inside, by a hook that
// runs after the node.
void queue_at_end(std::shared_ptr<const Closure> closure);

class QueueAgain final : public autograd::FunctionPostHook {
public:
    explicit QueueAgain(std::shared_ptr<const Closure> closure) : closure_(std::move(closure)) {}

    autograd::variable_list operator()(const autograd::variable_list& outputs, const autograd::variable_list&) override {
        // Once, however often the node may yet run.
        if (closure_) queue_at_end(std::move(closure_));
        return outputs;
    }

private:
    std::shared_ptr<const Closure> closure_;
};

void queue_at_end(std::shared_ptr<const Closure> closure) {
    autograd::Engine::get_default_engine().queue_callback([closure = std::move(closure)] {
        if (const auto outer = autograd::get_current_node()) {
            outer->add_post_hook(std::make_unique<QueueAgain>(closure));
        } else {
            call(*closure, nullptr);
        }
    });
}

// Calls the closure when a backward reaches a node.
class NodeHook final : public autograd::FunctionPreHook {
public:
    explicit NodeHook(Closure closure) : closure_(closure) {}
    NodeHook(const NodeHook&) = delete;
    NodeHook& operator=(const NodeHook&) = delete;
    ~NodeHook() override { closure_.drop(closure_.data); }

    autograd::variable_list operator()(const autograd::variable_list& grads) override {
        call(closure_, nullptr);
        return grads;
    }

private:
    const Closure closure_;
};

}  // namespace

void flow::box_gradients(const at::Tensor& leaf) {
    incoming_hook(leaf);
}

extern "C" {

// The data of the closure that `flow_set_grad_hook` put on the parameter, null if it has no hook.
// An error if it can have none.
char* flow_grad_hook(const at::Tensor* parameter, void** data) {
    return guarded([&] {
        TORCH_CHECK(parameter->defined() && parameter->is_leaf() && parameter->requires_grad(),
                    "only a leaf tensor that requires a gradient can have a gradient hook");
        *data = nullptr;
        if (const auto& hook = autograd::impl::post_acc_grad_hooks(*parameter)) {
            const auto ours = dynamic_cast<const GradHook*>(hook.get());
            TORCH_CHECK(ours, "the tensor has a gradient hook that is not Flow's");
            *data = ours->data();
        }
    });
}

// Calls the closure with the parameter, one that `flow_grad_hook` accepts, whenever its gradient
// has been accumulated in a backward.
char* flow_set_grad_hook(const at::Tensor* parameter, Closure closure) {
    return guarded([&] {
        auto hook = std::make_unique<GradHook>(closure, incoming_hook(*parameter).incoming);
        autograd::impl::set_post_acc_grad_hooks(*parameter, std::move(hook));
    });
}

// In a hook of the parameter: whether nothing else uses the memory of its gradient.
char* flow_grad_is_exclusive(const at::Tensor* parameter, bool* exclusive) {
    return guarded([&] {
        const auto ours = dynamic_cast<const GradHook*>(autograd::impl::post_acc_grad_hooks(*parameter).get());
        *exclusive = ours && ours->grad_is_exclusive(*parameter);
    });
}

// Calls the closure, with null, when the backward that runs on this thread, and all that it runs
// inside of, are otherwise done.
char* flow_at_end_of_backward(Closure closure) {
    return guarded([&] {
        const std::shared_ptr<void> owner(closure.data, closure.drop);
        TORCH_CHECK(autograd::get_current_graph_task_id() != -1, "no backward runs on this thread; call it from a gradient hook");
        const auto owned = std::make_shared<std::pair<std::shared_ptr<void>, Closure>>(owner, closure);
        queue_at_end({owned, &owned->second});
    });
}

// Calls the closure, with null, whenever a backward reaches the operation that computed the tensor.
// The closure is dropped with that operation, or at once if there is none.
char* flow_on_backward(const at::Tensor* tensor, Closure closure) {
    return guarded([&] {
        auto hook = std::make_unique<NodeHook>(closure);
        if (const auto& node = tensor->grad_fn()) node->add_pre_hook(std::move(hook));
    });
}

}  // extern "C"
