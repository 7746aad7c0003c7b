// What the files of the fake CUDA driver share: its state, and jobs on its streams.
#pragma once

#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "export.h"
#include "streams.h"

enum Result {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    CONTEXT_IS_DESTROYED = 709,
};

struct Context {
    int device;
    int retained = 0;
    std::shared_ptr<Stream> null_stream;
};

using Address = unsigned long long;

/// All that the process holds; never destroyed, as streams may outlive `main`.
struct Driver {
    std::mutex mutex;
    bool initialized = false;
    std::vector<Context> contexts;
    std::map<Stream*, std::shared_ptr<Stream>> streams;
    std::vector<std::weak_ptr<Stream>> all_streams;  // the destroyed ones too, until they have ended
    std::map<Event*, std::shared_ptr<Event>> events;
    std::map<Address, size_t> allocations;

    std::shared_ptr<Stream> start_stream(Context* context) {
        auto stream = Stream::start(context);
        all_streams.push_back(stream);
        return stream;
    }
};

inline Driver& driver = *new Driver;
inline thread_local Context* current = nullptr;

using Lock = std::unique_lock<std::mutex>;

/// What is wrong with the calling thread's context, if anything. Needs the lock.
inline Result check_context() {
    if (!driver.initialized) return NOT_INITIALIZED;
    if (!current) return INVALID_CONTEXT;
    return current->retained > 0 ? SUCCESS : CONTEXT_IS_DESTROYED;
}

/// The stream behind a handle; the handles 0 and 1 (CU_STREAM_LEGACY) are the null stream. Needs
/// the lock and a context.
inline std::shared_ptr<Stream> find_stream(void* handle) {
    if (reinterpret_cast<std::uintptr_t>(handle) <= 1) return current->null_stream;
    auto found = driver.streams.find(static_cast<Stream*>(handle));
    return found == driver.streams.end() ? nullptr : found->second;
}

inline std::shared_ptr<Event> find_event(void* handle) {
    auto found = driver.events.find(static_cast<Event*>(handle));
    return found == driver.events.end() ? nullptr : found->second;
}

/// FLOW_TEST_HOST_AS_GPU=1: all of the host's memory is the device's, and the null stream is the
/// calling thread. The tensors of a libtorch without CUDA can then stand for those of a GPU.
inline bool host_as_gpu() {
    static const bool chosen = [] {
        const char* text = std::getenv("FLOW_TEST_HOST_AS_GPU");
        return text && std::string(text) == "1";
    }();
    return chosen;
}

inline bool is_calling_thread(const std::shared_ptr<Stream>& stream) { return host_as_gpu() && stream == current->null_stream; }

inline bool is_device_memory(Address start, size_t bytes) {
    if (host_as_gpu()) return true;
    auto after = driver.allocations.upper_bound(start);
    if (after == driver.allocations.begin()) return false;
    auto [base, size] = *std::prev(after);
    return start - base <= size && bytes <= size - (start - base);
}

inline void* pointer(Address address) { return reinterpret_cast<void*>(address); }

inline Result device_exists(int device) {
    Lock lock(driver.mutex);
    if (!driver.initialized) return NOT_INITIALIZED;
    return device >= 0 && size_t(device) < driver.contexts.size() ? SUCCESS : INVALID_DEVICE;
}

/// FLOW_FAKE_WAITS=<prefix>: each call that has the host wait for the device is a line of
/// <prefix>.<RANK>.
inline void note_wait(const char* call) {
    static const char *prefix = std::getenv("FLOW_FAKE_WAITS"), *rank = std::getenv("RANK");
    if (!prefix) return;
    if (std::FILE* file = std::fopen((std::string(prefix) + "." + (rank ? rank : "0")).c_str(), "a")) {
        std::fprintf(file, "%s\n", call);
        std::fclose(file);
    }
}

/// Enqueues `job` if the memory it touches is the device's; `wait`: until it is done.
inline int submit(void* handle, std::initializer_list<Address> device_memory, size_t bytes, bool wait, Job job) {
    std::shared_ptr<Stream> stream;
    {
        Lock lock(driver.mutex);
        if (Result wrong = check_context()) return wrong;
        stream = find_stream(handle);
        if (!stream) return INVALID_HANDLE;
        for (Address start : device_memory)
            if (bytes && !is_device_memory(start, bytes)) return INVALID_VALUE;
        if (is_calling_thread(stream)) {
            lock.unlock();
            job();
            return SUCCESS;
        }
        stream->enqueue(std::move(job));
    }
    if (wait) note_wait("copy or cuStreamSynchronize"), stream->synchronize();
    return SUCCESS;
}

inline Job copy(void* to, const void* from, size_t bytes) {
    return [=] {
        if (bytes) std::memmove(to, from, bytes);
    };
}

/// Waits for all streams of `context`.
inline void synchronize(Context* context) {
    note_wait("cuCtxSynchronize or cuMemFree");
    std::vector<std::shared_ptr<Stream>> streams;
    {
        Lock lock(driver.mutex);
        std::vector<std::weak_ptr<Stream>> alive;
        for (auto& each : driver.all_streams)
            if (auto stream = each.lock()) {
                alive.push_back(stream);
                if (stream->context == context) streams.push_back(std::move(stream));
            }
        driver.all_streams = std::move(alive);
    }
    for (auto& stream : streams) stream->synchronize();
}
