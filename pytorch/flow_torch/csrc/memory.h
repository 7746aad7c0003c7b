// Tensors in memory that all ranks of the machine can reach.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include "group.h"

namespace flow {

// Smaller buckets are cheaper to copy than to have a block of their own.
constexpr size_t kMinShared = 64 << 10;

// A block of shared memory; null if there is none left, and in a forked process. A forked process gives none back.
inline c10::DataPtr allocate(const flow_group* group, size_t bytes) {
    flow_block* block = nullptr;
    void* data = nullptr;
    if (flow_alloc(group, bytes, &block, &data) != FLOW_OK) return {};
    const auto free = [](void* block) { flow_free(static_cast<flow_block*>(block)); };
    return {data, block, free, c10::kCPU};
}

// Undefined if there is no memory left.
inline at::Tensor empty_shared(const flow_group* group, at::IntArrayRef sizes, at::ScalarType type) {
    const size_t bytes = c10::multiply_integers(sizes) * c10::elementSize(type);
    auto memory = allocate(group, std::max<size_t>(bytes, 1));
    if (!memory) return {};
    auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(memory), nullptr,
                                                         /*resizable=*/false);
    return at::empty({0}, at::TensorOptions().dtype(type)).set_(c10::Storage(std::move(storage)), 0, sizes);
}

// Whether Python has the tensor itself. Buckets of DistributedDataParallel it has not, but where it has registered a hook for them.
inline bool is_seen(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() != nullptr;
}

// A block, and the memory that it stands for, to which something may still point.
struct Moved {
    c10::DataPtr now, before;
};

// Moves a bucket of DistributedDataParallel's to shared memory, and all its tensors with it: a tensor that is the whole of a storage
// from PyTorch's own allocator. A program may have seen the bucket by one of its views, and have the address, by numpy() say: what
// lay there before stays allocated as long as the bucket, but gets no more gradients. Without room the bucket stays.
inline void share_bucket(const flow_group* group, const at::Tensor& tensor) {
    const auto& storage = tensor.storage();
    const bool is_plain = storage.data_ptr().get_deleter() == c10::GetDefaultCPUAllocator()->raw_deleter();
    if (!is_plain || storage.nbytes() != tensor.nbytes()) return;
    if (auto memory = allocate(group, tensor.nbytes())) {
        std::memcpy(memory.get(), tensor.const_data_ptr(), tensor.nbytes());
        auto moved = std::make_unique<Moved>(Moved{std::move(memory), {}});
        void* const data = moved->now.get();
        const auto free = [](void* moved) { delete static_cast<Moved*>(moved); };
        auto* const both = moved.release();
        both->before = storage.set_data_ptr(c10::DataPtr(data, both, free, c10::kCPU));
    }
}

// Shared memory that each rank keeps for a bucket that does not lie there. All ranks have room for buckets of the same lengths:
// they agree on that, in the order of the operations.
class Staging {
public:
    bool has_room(size_t bytes) const { return bytes <= room_; }

    // Whether all ranks have room, for which they make it if they can. All of them call this in the same order.
    bool make_room(const flow_group* group, size_t bytes) {
        if (has_room(bytes) || bytes >= too_much_) return has_room(bytes);
        auto memory = allocate(group, bytes);
        int32_t has_memory = memory.get() != nullptr;
        check(flow_all_reduce(group, {&has_memory, 1, FLOW_I32}, FLOW_MIN));
        if (has_memory) {
            memory_ = std::move(memory);
            room_ = bytes;
        } else {
            too_much_ = bytes;
        }
        return has_memory;
    }

    void* memory() const { return memory_.get(); }
    // Null if a bucket that is under way has the memory.
    void* take() { return is_taken_.exchange(true) ? nullptr : memory(); }
    void give_back() { is_taken_ = false; }

private:
    c10::DataPtr memory_;
    size_t room_ = 0;
    size_t too_much_ = SIZE_MAX;
    std::atomic<bool> is_taken_{false};
};

}  // namespace flow
