// libtorch's large CPU tensors in memory from Rust.

#include "shim.hpp"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include <pthread.h>

#include <c10/core/CPUAllocator.h>

using flow::DropOwner;
using flow::guarded;

namespace {

// Memory for a tensor: `drop(owner)` frees it.
struct RawBlock {
    void* data;
    void* owner;
};

using TakeBlock = bool (*)(size_t bytes, RawBlock* block);

// Large blocks from Rust, all others from the allocator that was there before.
//
// libtorch's "raw" interface, which oneDNN's layers use unasked, frees by address alone: blocks are
// found by theirs.
class CpuAllocator final : public c10::Allocator {
public:
    CpuAllocator(c10::Allocator* original, TakeBlock take, DropOwner drop) : original_(original), take_(take), drop_(drop) {
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
            RawBlock block;
            if (take_(bytes, &block)) {
                c10::profiledCPUMemoryReporter().New(block.data, bytes);
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
            c10::profiledCPUMemoryReporter().Delete(data);
            drop_(node.mapped());
        } else {
            original_->raw_deleter()(data);
        }
    }

    c10::Allocator* const original_;
    const TakeBlock take_;
    const DropOwner drop_;
    std::atomic<size_t> min_bytes_{SIZE_MAX};
    std::mutex mutex_;
    std::unordered_map<void*, void*> owners_;
};

}  // namespace

extern "C" {

// From now on asks `take` for every block of at least `min_bytes`. The calls must not overlap.
char* flow_set_cpu_allocator(TakeBlock take, DropOwner drop, size_t min_bytes) {
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
