// What flow-autograd needs of libtorch's C++ interface, as plain C functions.
//
// Functions that can fail return the error's text, to be freed with free(), or null. No exception
// leaves this file except into libtorch's engine, and Rust code never unwinds into it: Rust
// callbacks return their error's text the same way. The types of pointers to autograd nodes differ
// between the libtorch versions we support: leave them to `auto`.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <dlfcn.h>
#include <pthread.h>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace autograd = torch::autograd;
namespace optim = torch::optim;

namespace {

// A Rust closure. Whoever gets one owns it, and calls `drop` once.
struct Closure {
    void* data;
    char* (*call)(void* data, const at::Tensor* argument);
    void (*drop)(void* data);
};

// Calls the closure and throws the error it returns.
void call(const Closure& closure, const at::Tensor* argument) {
    if (char* text = closure.call(closure.data, argument)) {
        const std::string message(text);
        std::free(text);
        throw std::runtime_error(message);
    }
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

// What came to a parameter last, to be accumulated: where it lies, and whether nobody else uses
// that memory.
struct Incoming {
    const c10::StorageImpl* storage = nullptr;
    bool alone = false;
};

// Fills in `Incoming`, before libtorch accumulates: afterwards it cannot be told, as what the
// engine holds for other nodes looks the same as what it is about to drop.
class IncomingHook final : public autograd::FunctionPreHook {
public:
    explicit IncomingHook(std::shared_ptr<Incoming> incoming) : incoming_(std::move(incoming)) {}

    autograd::variable_list operator()(const autograd::variable_list& grads) override {
        *incoming_ = Incoming{};
        if (grads.size() == 1 && grads[0].defined() && grads[0].has_storage()) {
            const auto& grad = grads[0];
            const auto& storage = grad.storage();
            // A view keeps the tensor that it is a view of.
            const bool alone = grad.is_view() ? storage.use_count() == 2 && grad._base().use_count() == 1 : storage.use_count() == 1;
            *incoming_ = {storage.unsafeGetStorageImpl(), alone};
        }
        return grads;
    }

private:
    const std::shared_ptr<Incoming> incoming_;
};

class GradHook final : public autograd::PostAccumulateGradHook {
public:
    GradHook(Closure closure, std::shared_ptr<Incoming> incoming) : closure_(closure), incoming_(std::move(incoming)) {}
    GradHook(const GradHook&) = delete;
    GradHook& operator=(const GradHook&) = delete;
    ~GradHook() override { closure_.drop(closure_.data); }

    void operator()(const at::Tensor& parameter) override { call(closure_, &parameter); }

    void* data() const { return closure_.data; }

    // During the hook: whether the parameter's gradient lies in memory of its own.
    bool owns_grad(const at::Tensor& parameter) const {
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

// Calls the closure when a backward comes to a node.
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

// Memory for a tensor: `drop(owner)` frees it.
struct Block {
    void* data;
    void* owner;
};

using TakeBlock = bool (*)(size_t bytes, Block* block);
using DropBlock = void (*)(void* owner);

// Large blocks from Rust, all others from the allocator that was there before.
//
// libtorch's "raw" interface, which oneDNN's layers use unasked, frees by address alone: blocks are
// found by theirs.
class CpuAllocator final : public c10::Allocator {
public:
    CpuAllocator(c10::Allocator* original, TakeBlock take, DropBlock drop) : original_(original), take_(take), drop_(drop) {
        TORCH_CHECK(original->raw_deleter(), "the CPU allocator in use does not free by address");
    }

    // The one that is installed. libtorch keeps a pointer to it in every storage: never freed.
    static inline CpuAllocator* installed = nullptr;

    void set_min_bytes(size_t bytes) { min_bytes_.store(bytes, std::memory_order_relaxed); }

    // A forked child has its memory from the original allocator, unless one is set there anew: the
    // blocks are its parent's. What it inherits it can free at any time, as no other thread holds
    // the lock while a process forks.
    static void watch_forks() {
        const int failed = pthread_atfork([] { installed->mutex_.lock(); }, [] { installed->mutex_.unlock(); },
                                          [] {
                                              installed->mutex_.unlock();
                                              installed->set_min_bytes(SIZE_MAX);
                                          });
        TORCH_CHECK(!failed, "no memory to watch for forks");
    }

    c10::DataPtr allocate(size_t bytes) override {
        if (bytes >= min_bytes_.load(std::memory_order_relaxed)) {
            Block block;
            if (take_(bytes, &block)) {
                std::lock_guard<std::mutex> lock(mutex_);
                owners_.emplace(block.data, block.owner);
                return {block.data, block.data, free_any, c10::Device(c10::kCPU)};
            }
        }
        return original_->allocate(bytes);
    }

    c10::DeleterFnPtr raw_deleter() const override { return free_any; }

    void copy_data(void* destination, const void* source, size_t bytes) const override {
        default_copy_data(destination, source, bytes);
    }

private:
    static void free_any(void* data) { installed->free(data); }

    void free(void* data) {
        std::unique_lock<std::mutex> lock(mutex_);
        const auto node = owners_.extract(data);
        lock.unlock();
        if (node) {
            drop_(node.mapped());
        } else {
            original_->raw_deleter()(data);
        }
    }

    c10::Allocator* const original_;
    const TakeBlock take_;
    const DropBlock drop_;
    std::atomic<size_t> min_bytes_{SIZE_MAX};
    std::mutex mutex_;
    std::unordered_map<void*, void*> owners_;
};

// Where a tensor's elements are. `data` is null where they are not plain memory.
struct Memory {
    void* data;
    size_t bytes;
    bool on_cpu;
    bool on_cuda;
    bool dense_contiguous;
};

// An error that begins with `name`, if the tensor's elements do not lie in plain memory of the CPU
// or a GPU.
void check_plain(const at::Tensor& tensor, const std::string& name) {
    TORCH_CHECK(tensor.defined(), name, "is undefined: it must have a shape and elements");
    TORCH_CHECK(!tensor.is_nested(), name, "is nested: pad it, or use its parts");
    TORCH_CHECK(tensor.layout() == c10::kStrided, name, "has the layout ", tensor.layout(), ": make it dense by to_dense()");
    TORCH_CHECK(tensor.is_cpu() || tensor.is_cuda(), name, "is on ", tensor.device(), ": it must be on the CPU or a GPU");
    TORCH_CHECK(!tensor.is_quantized(), name, "is quantized: make it an ordinary tensor by dequantize()");
    TORCH_CHECK(tensor.has_storage(), name, "has no memory");
}

// A part of what an optimizer keeps for a parameter: a tensor like the parameter, or a count.
struct Part {
    std::string name;
    at::Tensor* tensor;
    int64_t* count;
};

std::unique_ptr<optim::OptimizerParamState> new_state(const optim::OptimizerOptions& options) {
    if (dynamic_cast<const optim::SGDOptions*>(&options)) return std::make_unique<optim::SGDParamState>();
    if (dynamic_cast<const optim::AdamOptions*>(&options)) return std::make_unique<optim::AdamParamState>();
    if (dynamic_cast<const optim::AdamWOptions*>(&options)) return std::make_unique<optim::AdamWParamState>();
    if (dynamic_cast<const optim::RMSpropOptions*>(&options)) return std::make_unique<optim::RMSpropParamState>();
    TORCH_CHECK(false, "this kind of optimizer is not known; SGD, Adam, AdamW and RMSprop are");
}

// The parts of a state that an optimizer with these options uses, with their names in PyTorch.
std::vector<Part> parts(optim::OptimizerParamState& state, const optim::OptimizerOptions& options) {
    const auto of_adam = [](auto& adam, bool amsgrad) {
        std::vector<Part> parts{{"step", nullptr, &adam.step()},
                                {"exp_avg", &adam.exp_avg(), nullptr},
                                {"exp_avg_sq", &adam.exp_avg_sq(), nullptr}};
        if (amsgrad) parts.push_back({"max_exp_avg_sq", &adam.max_exp_avg_sq(), nullptr});
        return parts;
    };
    if (const auto sgd = dynamic_cast<optim::SGDParamState*>(&state)) {
        return {{"momentum_buffer", &sgd->momentum_buffer(), nullptr}};
    }
    if (const auto adam = dynamic_cast<optim::AdamParamState*>(&state)) {
        return of_adam(*adam, dynamic_cast<const optim::AdamOptions&>(options).amsgrad());
    }
    if (const auto adam = dynamic_cast<optim::AdamWParamState*>(&state)) {
        return of_adam(*adam, dynamic_cast<const optim::AdamWOptions&>(options).amsgrad());
    }
    auto& rms = dynamic_cast<optim::RMSpropParamState&>(state);
    const auto& rms_options = dynamic_cast<const optim::RMSpropOptions&>(options);
    std::vector<Part> parts{{"step", nullptr, &rms.step()}, {"square_avg", &rms.square_avg(), nullptr}};
    if (rms_options.momentum() > 0) parts.push_back({"momentum_buffer", &rms.momentum_buffer(), nullptr});
    if (rms_options.centered()) parts.push_back({"grad_avg", &rms.grad_avg(), nullptr});
    return parts;
}

// Calls `run` with each of the optimizer's parameters, its number with a dot, and its options.
template <typename Run>
void each_parameter(const optim::Optimizer& optimizer, Run&& run) {
    size_t number = 0;
    for (const auto& group : optimizer.param_groups()) {
        for (const auto& parameter : group.params()) run(parameter, std::to_string(number++) + ".", group.options());
    }
}

using TellTensor = void (*)(void* data, const char* name, at::Tensor* tensor);

}  // namespace

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
        const auto incoming = std::make_shared<Incoming>();
        auto hook = std::make_unique<GradHook>(closure, incoming);
        autograd::impl::add_hook(*parameter, std::make_unique<IncomingHook>(incoming));
        autograd::impl::set_post_acc_grad_hooks(*parameter, std::move(hook));
    });
}

// Whether, in a hook of the parameter, its gradient lies in memory that nobody else uses.
char* flow_owns_grad(const at::Tensor* parameter, bool* owns) {
    return guarded([&] {
        const auto ours = dynamic_cast<const GradHook*>(autograd::impl::post_acc_grad_hooks(*parameter).get());
        *owns = ours && ours->owns_grad(*parameter);
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

// Calls the closure, with null, whenever a backward comes to the operation that the tensor is a
// result of. Drops it with that, or at once if there is none.
char* flow_on_backward(const at::Tensor* tensor, Closure closure) {
    return guarded([&] {
        auto hook = std::make_unique<NodeHook>(closure);
        if (const auto& node = tensor->grad_fn()) node->add_pre_hook(std::move(hook));
    });
}

// How many tensor handles there are of the tensor, this one included.
size_t flow_use_count(const at::Tensor* tensor) { return tensor->use_count(); }

// Makes `grad`, or nothing if null, the parameter's gradient.
char* flow_set_grad(const at::Tensor* parameter, const at::Tensor* grad) {
    return guarded([&] {
        TORCH_CHECK(parameter->defined(), "the tensor is undefined");
        if (grad) {
            TORCH_CHECK(grad->defined(), "the gradient is undefined");
            TORCH_CHECK(grad->sizes() == parameter->sizes() && grad->scalar_type() == parameter->scalar_type() &&
                            grad->device() == parameter->device(),
                        "a gradient of shape ", grad->sizes(), ", ", grad->scalar_type(), ", on ", grad->device(),
                        " does not fit a tensor of shape ", parameter->sizes(), ", ", parameter->scalar_type(), ", on ",
                        parameter->device());
        }
        parameter->mutable_grad() = grad ? *grad : at::Tensor();
    });
}

char* flow_check_plain(const at::Tensor* tensor) {
    return guarded([&] { check_plain(*tensor, ""); });
}

// What all handles to one tensor have in common, and no other tensor that lives has; views are
// tensors of their own.
const void* flow_identity(const at::Tensor* tensor) { return tensor->unsafeGetTensorImpl(); }

char* flow_memory(const at::Tensor* tensor, Memory* memory) {
    return guarded([&] {
        *memory = Memory{};
        if (!tensor->defined()) return;
        memory->on_cpu = tensor->is_cpu();
        memory->on_cuda = tensor->is_cuda();
        if (tensor->layout() != c10::kStrided || !tensor->has_storage()) return;
        memory->data = tensor->data_ptr();
        memory->bytes = tensor->nbytes();
        memory->dense_contiguous = tensor->is_contiguous() && !tensor->is_neg() && !tensor->is_conj();
    });
}

// Loads the CUDA part of libtorch, which lies beside the CPU part, if it is not there yet.
char* flow_load_cuda() {
    return guarded([] {
        if (c10::impl::hasDeviceGuardImpl(c10::kCUDA)) return;
        Dl_info cpu;
        TORCH_CHECK(dladdr(reinterpret_cast<void*>(&at::globalContext), &cpu), "cannot tell where libtorch is");
        const std::string path(cpu.dli_fname);
        const std::string cuda = path.substr(0, path.rfind('/') + 1) + "libtorch_cuda.so";
        // It registers itself with the CPU part, for as long as the process lives.
        TORCH_CHECK(dlopen(cuda.c_str(), RTLD_NOW | RTLD_GLOBAL), dlerror());
        TORCH_CHECK(c10::impl::hasDeviceGuardImpl(c10::kCUDA), cuda, " did not register with libtorch");
    });
}

// The CUDA stream on which this thread's work on the device is at present.
char* flow_current_stream(int device, void** stream) {
    return guarded([&] {
        const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
        *stream = cuda.getStream(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device))).native_handle();
    });
}

// Calls `tell`, which owns the tensor that it gets, with a copy of each part of the optimizer's
// state.
char* flow_optimizer_state(const optim::Optimizer* optimizer, void* data, TellTensor tell) {
    return guarded([&] {
        const auto& states = optimizer->state();
        each_parameter(*optimizer, [&](const at::Tensor& parameter, const std::string& number, const auto& options) {
            const auto state = states.find(parameter.unsafeGetTensorImpl());
            if (state == states.end()) return;
            for (const auto& part : parts(*state->second, options)) {
                const auto value = part.count ? at::scalar_tensor(*part.count, at::kLong) : part.tensor->detach().clone();
                tell(data, (number + part.name).c_str(), new at::Tensor(value));
            }
        });
    });
}

// Replaces the optimizer's state by copies of these tensors, which have the names that
// `flow_optimizer_state` tells. Does nothing if they do not fit.
char* flow_set_optimizer_state(optim::Optimizer* optimizer, const char* const* names, const at::Tensor* const* tensors,
                               size_t count) {
    return guarded([&] {
        std::unordered_map<std::string, const at::Tensor*> given;
        for (size_t i = 0; i < count; ++i) given.emplace(names[i], tensors[i]);

        std::remove_reference_t<decltype(optimizer->state())> states;
        each_parameter(*optimizer, [&](const at::Tensor& parameter, const std::string& number, const auto& options) {
            auto state = new_state(options);
            const auto wanted = parts(*state, options);
            const auto is_given = [&](const Part& part) { return given.count(number + part.name) > 0; };
            if (std::none_of(wanted.begin(), wanted.end(), is_given)) return;  // had no gradient yet
            for (const auto& part : wanted) {
                TORCH_CHECK(is_given(part), "the state lacks ", number, part.name);
                const at::Tensor* const tensor = given.extract(number + part.name).mapped();
                check_plain(*tensor, number + part.name + " ");
                const at::Tensor value = tensor->detach();
                if (part.count) {
                    TORCH_CHECK(value.dim() == 0 && value.scalar_type() == at::kLong, number, part.name, " is not a count");
                    *part.count = value.item<int64_t>();
                } else {
                    TORCH_CHECK(value.sizes() == parameter.sizes() && value.scalar_type() == parameter.scalar_type(), number,
                                part.name, " has shape ", value.sizes(), " and type ", value.scalar_type(),
                                ", its parameter has ", parameter.sizes(), " and ", parameter.scalar_type());
                    *part.tensor = value.to(parameter.device(), parameter.scalar_type(), false, /*copy=*/true);
                }
            }
            states.emplace(parameter.unsafeGetTensorImpl(), std::move(state));
        });
        TORCH_CHECK(given.empty(), "the state has ", given.begin()->first, ", which the optimizer has no place for");
        optimizer->state() = std::move(states);
    });
}

// Ties `owner` to the tensor's memory, which nobody owned before: `drop(owner)` is called when its
// last user is gone.
char* flow_own_memory(const at::Tensor* tensor, void* owner, DropBlock drop) {
    std::unique_ptr<void, DropBlock> held(owner, drop);
    return guarded([&] {
        const auto& storage = tensor->storage();
        c10::DataPtr owned(storage.mutable_data(), held.get(), drop, storage.device());
        held.release();
        storage.set_data_ptr_noswap(std::move(owned));
    });
}

// From now on asks `take` for every block of at least `min_bytes`. The calls must not overlap.
char* flow_set_cpu_allocator(TakeBlock take, DropBlock drop, size_t min_bytes) {
    return guarded([&] {
        auto& installed = CpuAllocator::installed;
        if (!installed) {
            constexpr uint8_t priority = 100;  // the default allocator's is 0
            auto allocator = std::make_unique<CpuAllocator>(c10::GetCPUAllocator(), take, drop);
            c10::SetCPUAllocator(allocator.get(), priority);
            TORCH_CHECK(c10::GetCPUAllocator() == allocator.get(), "another CPU allocator is installed with a higher priority");
            installed = allocator.release();
            CpuAllocator::watch_forks();
        }
        installed->set_min_bytes(min_bytes);
    });
}

}  // extern "C"
