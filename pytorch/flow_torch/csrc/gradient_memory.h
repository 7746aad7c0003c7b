// Gradients that come into being in shared memory.
#pragma once

#include <map>
#include <mutex>
#include <unordered_map>

#include <pthread.h>

#include <torch/csrc/autograd/graph_task.h>

#include "memory.h"

namespace flow {

// PyTorch's CPU allocator, but for one case: where backward runs, a block that is as long as some gradient comes from shared memory.
// Most of these become gradients. What else gets one is none the worse for it.
//
// PyTorch's "raw" interface, which oneDNN uses, frees by address alone: blocks are found by theirs.
class GradientAllocator final : public c10::Allocator {
public:
    // The one in use; null if the program has an allocator that cannot be replaced. Storages point to it: it is never freed.
    static GradientAllocator* get() {
        static GradientAllocator* const installed = install();
        return installed;
    }

    // Gives backward blocks of this length from the group, from now on.
    void add(size_t bytes, const Group& group) {
        std::lock_guard<std::mutex> lock(mutex_);
        groups_.emplace(bytes, group);
    }

    // Ends one `add`.
    void remove(size_t bytes, const Group& group) {
        Group last;  // outlives the lock
        std::lock_guard<std::mutex> lock(mutex_);
        const auto [begin, end] = groups_.equal_range(bytes);
        const auto found = std::find_if(begin, end, [&](const auto& entry) { return entry.second == group; });
        if (found == end) return;
        last = std::move(found->second);
        groups_.erase(found);
    }

    c10::DataPtr allocate(size_t bytes) override {
        if (bytes >= kMinShared && torch::autograd::get_current_graph_task_id() != -1) {
            if (void* const data = take(bytes)) return {data, data, free_any, c10::Device(c10::kCPU)};
        }
        return original_->allocate(bytes);
    }

    c10::DeleterFnPtr raw_deleter() const override { return free_any; }

    void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

private:
    explicit GradientAllocator(c10::Allocator* original) : original_(original) {}

    static GradientAllocator* install() {
        constexpr uint8_t kPriority = 100;  // PyTorch's own has 0
        auto* const original = c10::GetCPUAllocator();
        if (!original->raw_deleter()) return nullptr;
        auto own = std::unique_ptr<GradientAllocator>(new GradientAllocator(original));
        c10::SetCPUAllocator(own.get(), kPriority);
        if (c10::GetCPUAllocator() != own.get()) return nullptr;
        // No other thread holds the lock while the process forks. A forked process gets no shared memory, and gives none back.
        pthread_atfork([] { get()->mutex_.lock(); }, [] { get()->mutex_.unlock(); }, [] { get()->mutex_.unlock(); });
        return own.release();
    }

    // Null if this is no gradient's length, or there is no shared memory left.
    void* take(size_t bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto found = groups_.find(bytes);
        flow_block* block = nullptr;
        void* data = nullptr;
        if (found == groups_.end() || flow_alloc(found->second.get(), bytes, &block, &data) != FLOW_OK) return nullptr;
        blocks_.emplace(data, block);
        c10::profiledCPUMemoryReporter().New(data, bytes);
        return data;
    }

    static void free_any(void* data) {
        auto* const own = get();
        std::unique_lock<std::mutex> lock(own->mutex_);
        const auto block = own->blocks_.extract(data);
        lock.unlock();
        if (block) {
            c10::profiledCPUMemoryReporter().Delete(data);
            flow_free(block.mapped());
        } else {
            own->original_->raw_deleter()(data);
        }
    }

    c10::Allocator* const original_;
    std::mutex mutex_;
    std::multimap<size_t, Group> groups_;
    std::unordered_map<void*, flow_block*> blocks_;
};

}  // namespace flow
