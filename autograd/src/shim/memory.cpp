// Tensors as memory, memory as tensors, and CUDA.

#include "shim.hpp"

#include <memory>
#include <string>

#include <dlfcn.h>

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

using flow::check_plain;
using flow::DropOwner;
using flow::guarded;

namespace {

// Where a tensor's elements are. `data` is null where they are not plain memory.
struct TensorMemory {
    void* data;
    size_t bytes;
    bool on_cpu;
    bool on_cuda;
    bool dense_contiguous;
};

}  // namespace

extern "C" {

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

// Has autograd know that the tensor's values are others now.
char* flow_bump_version(const at::Tensor* tensor) {
    return guarded([&] { tensor->unsafeGetTensorImpl()->bump_version(); });
}

char* flow_check_plain(const at::Tensor* tensor) {
    return guarded([&] { check_plain(*tensor, ""); });
}

// What all handles to one tensor have in common, and no other tensor that lives has; views are
// tensors of their own.
const void* flow_identity(const at::Tensor* tensor) { return tensor->unsafeGetTensorImpl(); }

char* flow_memory(const at::Tensor* tensor, TensorMemory* memory) {
    return guarded([&] {
        *memory = TensorMemory{};
        if (!tensor->defined()) return;
        memory->on_cpu = tensor->is_cpu();
        memory->on_cuda = tensor->is_cuda();
        if (tensor->layout() != c10::kStrided || !tensor->has_storage()) return;
        memory->data = tensor->data_ptr();
        memory->bytes = tensor->nbytes();
        const bool is_lazy = tensor->is_neg() || tensor->is_conj() || tensor->_is_zerotensor();
        memory->dense_contiguous = tensor->is_contiguous() && !is_lazy;
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

// Ties `owner` to the tensor's memory, which nobody owned before: `drop(owner)` is called when its
// last user is gone.
char* flow_own_memory(const at::Tensor* tensor, void* owner, DropOwner drop) {
    std::unique_ptr<void, DropOwner> held(owner, drop);
    return guarded([&] {
        const auto& storage = tensor->storage();
        c10::DataPtr owned(storage.mutable_data(), held.get(), drop, storage.device());
        held.release();
        storage.set_data_ptr_noswap(std::move(owned));
    });
}

}  // extern "C"
