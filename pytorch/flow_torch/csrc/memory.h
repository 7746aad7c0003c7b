// Tensors in memory that all ranks of the machine can reach.
#pragma once

#include <cstring>
#include <mutex>
#include <set>

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

// The memory of a bucket of DistributedDataParallel's that was moved: a block, and what it stands for, to which something may still
// point.
struct Bucket {
    explicit Bucket(c10::DataPtr block) : now(std::move(block)) {}

    const c10::DataPtr now;
    c10::DataPtr before;

    // Whether all ranks of a group have the bucket in shared memory, as far as they have asked each other.
    bool is_shared_in(uint64_t group) {
        std::lock_guard<std::mutex> lock(mutex_);
        return groups_.count(group) > 0;
    }
    void shared_in(uint64_t group) {
        std::lock_guard<std::mutex> lock(mutex_);
        groups_.insert(group);
    }

    static void free(void* bucket) { delete static_cast<Bucket*>(bucket); }

private:
    std::mutex mutex_;
    std::set<uint64_t> groups_;
};

// Moves a bucket to shared memory, and all its tensors with it: a tensor that is the whole of a storage from PyTorch's own allocator.
// Null if it stays. A program may have seen the bucket by one of its views, and have the address, by numpy() say: what lay there
// before stays allocated as long as the bucket, but gets no more gradients. A bucket that Python has seen itself stays.
inline Bucket* share_bucket(const flow_group* group, const at::Tensor& tensor) {
    const auto& storage = tensor.storage();
    const auto& memory = storage.data_ptr();
    if (memory.get_deleter() == &Bucket::free) {
        const bool is_shared = flow_is_shared(group, tensor.const_data_ptr(), tensor.nbytes());
        return is_shared ? static_cast<Bucket*>(memory.get_context()) : nullptr;
    }
    const bool is_plain = memory.get_deleter() == c10::GetDefaultCPUAllocator()->raw_deleter();
    const bool is_seen = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() != nullptr;
    if (!is_plain || is_seen || storage.nbytes() != tensor.nbytes()) return nullptr;
    auto block = allocate(group, tensor.nbytes());
    if (!block) return nullptr;
    std::memcpy(block.get(), tensor.const_data_ptr(), tensor.nbytes());
    void* const data = block.get();
    auto* const bucket = new Bucket(std::move(block));
    bucket->before = storage.set_data_ptr(c10::DataPtr(data, bucket, &Bucket::free, c10::kCPU));
    return bucket;
}

}  // namespace flow
