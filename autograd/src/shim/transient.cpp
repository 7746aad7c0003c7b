// Memory that tensors have for a time only.

#include "shim.hpp"

#include <utility>

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

using flow::guarded;

namespace {

// A tensor of one dimension over a storage without memory.
at::Tensor without_memory(const at::Tensor& like, int64_t elements) {
    const at::Tensor tensor = at::empty({0}, like.options());
    const auto device = tensor.device();
    const auto bytes = static_cast<int64_t>(elements * tensor.element_size());
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device), tensor.storage().allocator(), false));
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(elements);
    return tensor;
}

}  // namespace

extern "C" {

// Makes two tensors of so many elements of the kind and on the device of `like`: one whose memory comes and goes, and
// one that has none, where each access is an error with this text.
char* flow_transient_new(const at::Tensor* like, int64_t elements, const char* text, at::Tensor** memory,
                         at::Tensor** absent) {
    return guarded([&] {
        auto none = without_memory(*like, elements);
        none.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(text);
        *memory = new at::Tensor(without_memory(*like, elements));
        *absent = new at::Tensor(std::move(none));
    });
}

// Gives memory to all tensors that share this one's storage.
char* flow_transient_allocate(const at::Tensor* memory) {
    return guarded([&] {
        const c10::DeviceGuard guard(memory->device());
        auto& storage = *memory->storage().unsafeGetStorageImpl();
        storage.set_data_ptr_noswap(storage.allocator()->allocate(memory->nbytes()));
        storage.set_nbytes(memory->nbytes());
    });
}

// Takes it from them. Operations that make views of them are errors then.
void flow_transient_free(const at::Tensor* memory) {
    auto& storage = *memory->storage().unsafeGetStorageImpl();
    storage.set_data_ptr_noswap(c10::DataPtr(nullptr, memory->device()));
    storage.set_nbytes(0);
}

// Has a tensor's elements lie in the storage of `memory`, contiguously from element `start` on.
char* flow_transient_place(const at::Tensor* tensor, const at::Tensor* memory, int64_t start) {
    return guarded([&] {
        auto& impl = *tensor->unsafeGetTensorImpl();
        const auto sizes = tensor->sizes().vec();
        TORCH_CHECK(tensor->scalar_type() == memory->scalar_type() && start + tensor->numel() <= memory->numel(),
                    "the tensor does not fit the memory");
        impl.set_allow_tensor_metadata_change(true);
        impl.set_storage_keep_dtype(memory->storage());
        impl.set_storage_offset(start);
        impl.set_sizes_contiguous(sizes);
    });
}

}  // extern "C"
