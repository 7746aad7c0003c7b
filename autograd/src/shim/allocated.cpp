// How much memory libtorch allocates.

#include "shim.hpp"

#include <memory>
#include <mutex>
#include <unordered_map>

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

using flow::guarded;

namespace {

namespace profiler = torch::profiler::impl;

// Stands where a profiler would: allocators report to that. It records nothing else.
class Blocks final : public profiler::ProfilerStateBase {
public:
    Blocks() : ProfilerStateBase(profiler::ProfilerConfig(profiler::ProfilerState::Disabled)) {}

    bool memoryProfilingEnabled() const override { return true; }
    profiler::ActiveProfilerType profilerType() override { return profiler::ActiveProfilerType::NONE; }

    // `size` is negative when the block is freed. What was there before is none of ours.
    void reportMemoryUsage(void* block, int64_t size, size_t, size_t, c10::Device) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (size > 0) {
            sizes_[block] = static_cast<size_t>(size);
        } else {
            sizes_.erase(block);
        }
    }

    size_t bytes() {
        const std::lock_guard<std::mutex> lock(mutex_);
        size_t sum = 0;
        for (const auto& block : sizes_) sum += block.second;
        return sum;
    }

private:
    std::mutex mutex_;
    std::unordered_map<void*, size_t> sizes_;
};

struct Measurement {
    std::shared_ptr<Blocks> blocks = std::make_shared<Blocks>();
    c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, blocks};
};

}  // namespace

extern "C" {

// Begins on this thread.
char* flow_measure_allocated(Measurement** result) {
    return guarded([&] { *result = std::make_unique<Measurement>().release(); });
}

// Ends, on the same thread, the last measurement that has begun: the bytes that are still there.
size_t flow_end_measurement(Measurement* measurement) {
    const size_t bytes = measurement->blocks->bytes();
    delete measurement;
    return bytes;
}

}  // extern "C"
