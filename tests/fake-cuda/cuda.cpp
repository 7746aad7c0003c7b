// A fake of the CUDA driver (libcuda.so.1) on machines without a GPU, for tests of what Flow
// asks of the driver: device memory is host memory, a stream is a thread, kernels run on the CPU
// (kernels.cpp). It shows whether calls are made in the right order with the right arguments. It is
// never a GPU result: it says nothing about speed, nor about what a GPU would compute.
//
// It is stricter than the driver where that finds mistakes: every call needs a current context,
// streams (the null stream too) are never ordered but by events, pageable memory is copied when the
// job runs, and fresh and freed memory is filled with 0xCD and 0xDD. Releasing a primary context
// frees nothing.

#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "export.h"
#include "kernels.h"
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

namespace {

using Address = unsigned long long;

struct Module {
    std::string options;
};

struct Uuid {
    char bytes[16];
};

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

Driver& driver = *new Driver;
thread_local Context* current = nullptr;

using Lock = std::unique_lock<std::mutex>;

/// What is wrong with the calling thread's context, if anything. Needs the lock.
Result check_context() {
    if (!driver.initialized) return NOT_INITIALIZED;
    if (!current) return INVALID_CONTEXT;
    return current->retained > 0 ? SUCCESS : CONTEXT_IS_DESTROYED;
}

/// The stream behind a handle; the handles 0 and 1 (CU_STREAM_LEGACY) are the null stream. Needs
/// the lock and a context.
std::shared_ptr<Stream> find_stream(void* handle) {
    if (reinterpret_cast<std::uintptr_t>(handle) <= 1) return current->null_stream;
    auto found = driver.streams.find(static_cast<Stream*>(handle));
    return found == driver.streams.end() ? nullptr : found->second;
}

std::shared_ptr<Event> find_event(void* handle) {
    auto found = driver.events.find(static_cast<Event*>(handle));
    return found == driver.events.end() ? nullptr : found->second;
}

/// FLOW_TEST_HOST_AS_GPU=1: all of the host's memory is the device's, and the null stream is the
/// calling thread. The tensors of a libtorch without CUDA can then stand for those of a GPU.
bool host_as_gpu() {
    static const bool chosen = [] {
        const char* text = std::getenv("FLOW_TEST_HOST_AS_GPU");
        return text && std::string(text) == "1";
    }();
    return chosen;
}

bool is_calling_thread(const std::shared_ptr<Stream>& stream) { return host_as_gpu() && stream == current->null_stream; }

bool is_device_memory(Address start, size_t bytes) {
    if (host_as_gpu()) return true;
    auto after = driver.allocations.upper_bound(start);
    if (after == driver.allocations.begin()) return false;
    auto [base, size] = *std::prev(after);
    return start - base <= size && bytes <= size - (start - base);
}

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

Result device_exists(int device) {
    Lock lock(driver.mutex);
    if (!driver.initialized) return NOT_INITIALIZED;
    return device >= 0 && size_t(device) < driver.contexts.size() ? SUCCESS : INVALID_DEVICE;
}

/// FLOW_FAKE_WAITS=<prefix>: each call that has the host wait for the device is a line of
/// <prefix>.<RANK>.
void note_wait(const char* call) {
    static const char *prefix = std::getenv("FLOW_FAKE_WAITS"), *rank = std::getenv("RANK");
    if (!prefix) return;
    if (std::FILE* file = std::fopen((std::string(prefix) + "." + (rank ? rank : "0")).c_str(), "a")) {
        std::fprintf(file, "%s\n", call);
        std::fclose(file);
    }
}

/// Enqueues `job` if the memory it touches is the device's; `wait`: until it is done.
int submit(void* handle, std::initializer_list<Address> device_memory, size_t bytes, bool wait, Job job) {
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

Job copy(void* to, const void* from, size_t bytes) {
    return [=] {
        if (bytes) std::memmove(to, from, bytes);
    };
}

/// Waits for all streams of `context`.
void synchronize(Context* context) {
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

struct Error {
    int code;
    const char *name, *text;
};

const Error errors[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
};

int find_error(int code, const char** text, const char* Error::*field) {
    for (const Error& error : errors)
        if (error.code == code) return *text = error.*field, SUCCESS;
    *text = nullptr;
    return INVALID_VALUE;
}

}  // namespace

// The driver and its devices.

EXPORT int cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    const char* text = std::getenv("FLOW_FAKE_GPUS");
    int count = text ? std::atoi(text) : 1;
    if (count <= 0) return NO_DEVICE;
    Lock lock(driver.mutex);
    if (driver.initialized) return SUCCESS;
    for (int device = 0; device < count; ++device) driver.contexts.push_back({device, 0, nullptr});
    driver.initialized = true;
    return SUCCESS;
}

EXPORT int cuDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }

EXPORT int cuDeviceGetCount(int* count) {
    Lock lock(driver.mutex);
    if (!driver.initialized) return NOT_INITIALIZED;
    return *count = int(driver.contexts.size()), SUCCESS;
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
    if (Result wrong = device_exists(ordinal)) return wrong;
    return *device = ordinal, SUCCESS;
}

EXPORT int cuDeviceGetName(char* name, int length, int device) {
    if (Result wrong = device_exists(device)) return wrong;
    if (length <= 0) return INVALID_VALUE;
    std::strncpy(name, "fake", length);
    name[length - 1] = 0;
    return SUCCESS;
}

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
    if (Result wrong = device_exists(device)) return wrong;
    static const std::map<int, int> values = {
        {16, 132},  // multiprocessors
        {75, 9},    // compute capability, major
        {76, 0},    // and minor
    };
    auto found = values.find(attribute);
    return *value = found == values.end() ? 0 : found->second, SUCCESS;
}

EXPORT int cuDeviceGetUuid(Uuid* uuid, int device) {
    if (Result wrong = device_exists(device)) return wrong;
    std::memcpy(uuid->bytes, "flow fake gpu ", 14);
    uuid->bytes[14] = char(device >> 8);
    uuid->bytes[15] = char(device);
    return SUCCESS;
}

ALSO(cuDeviceGetUuid_v2, cuDeviceGetUuid);

EXPORT int cuGetErrorName(int code, const char** text) { return find_error(code, text, &Error::name); }

EXPORT int cuGetErrorString(int code, const char** text) { return find_error(code, text, &Error::text); }

// Contexts: the primary ones alone.

EXPORT int cuDevicePrimaryCtxRetain(Context** context, int device) {
    if (Result wrong = device_exists(device)) return wrong;
    Lock lock(driver.mutex);
    Context& primary = driver.contexts[device];
    if (!primary.null_stream) primary.null_stream = driver.start_stream(&primary);
    ++primary.retained;
    return *context = &primary, SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    if (Result wrong = device_exists(device)) return wrong;
    Lock lock(driver.mutex);
    int& retained = driver.contexts[device].retained;
    if (retained == 0) return INVALID_CONTEXT;
    --retained;
    return SUCCESS;
}

ALSO(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2);

EXPORT int cuCtxGetCurrent(Context** context) {
    Lock lock(driver.mutex);
    if (!driver.initialized) return NOT_INITIALIZED;
    return *context = current, SUCCESS;
}

EXPORT int cuCtxSetCurrent(Context* context) {
    Lock lock(driver.mutex);
    if (!driver.initialized) return NOT_INITIALIZED;
    return current = context, SUCCESS;
}

EXPORT int cuCtxGetDevice(int* device) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    return *device = current->device, SUCCESS;
}

EXPORT int cuCtxSynchronize() {
    {
        Lock lock(driver.mutex);
        if (Result wrong = check_context()) return wrong;
    }
    synchronize(current);
    return SUCCESS;
}

EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return SUCCESS;
}

// Streams.

EXPORT int cuStreamCreateWithPriority(void** handle, unsigned flags, int) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    if (flags > 1) return INVALID_VALUE;
    auto stream = driver.start_stream(current);
    *handle = stream.get();
    driver.streams[stream.get()] = stream;
    return SUCCESS;
}

EXPORT int cuStreamCreate(void** handle, unsigned flags) { return cuStreamCreateWithPriority(handle, flags, 0); }

EXPORT int cuStreamDestroy_v2(void* handle) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    auto found = driver.streams.find(static_cast<Stream*>(handle));
    if (found == driver.streams.end()) return INVALID_HANDLE;
    found->second->close();
    driver.streams.erase(found);
    return SUCCESS;
}

ALSO(cuStreamDestroy, cuStreamDestroy_v2);

EXPORT int cuStreamWaitEvent(void* handle, void* event_handle, unsigned flags) {
    if (flags > 1) return INVALID_VALUE;
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    auto stream = find_stream(handle);
    auto event = find_event(event_handle);
    if (!stream || !event) return INVALID_HANDLE;
    if (event->mark && is_calling_thread(stream)) {
        const auto mark = event->mark;
        lock.unlock();
        mark->wait();
        return SUCCESS;
    }
    if (event->mark) stream->enqueue([mark = event->mark] { mark->wait(); });
    return SUCCESS;
}

EXPORT int cuStreamSynchronize(void* handle) { return submit(handle, {}, 0, true, [] {}); }

EXPORT int cuStreamQuery(void* handle) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    auto stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    return stream->idle() ? SUCCESS : NOT_READY;
}

/// For the other fakes: runs `job(data)` on a stream.
EXPORT int flow_fake_enqueue(void* handle, void (*job)(void*), void* data) {
    return submit(handle, {}, 0, false, [=] { job(data); });
}

// Events.

EXPORT int cuEventCreate(void** handle, unsigned flags) {
    constexpr unsigned disable_timing = 2;
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    auto event = std::make_shared<Event>(Event{current, !(flags & disable_timing), nullptr});
    *handle = event.get();
    driver.events[event.get()] = event;
    return SUCCESS;
}

EXPORT int cuEventDestroy_v2(void* handle) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    return driver.events.erase(static_cast<Event*>(handle)) ? SUCCESS : INVALID_HANDLE;
}

ALSO(cuEventDestroy, cuEventDestroy_v2);

EXPORT int cuEventRecord(void* handle, void* stream_handle) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    auto event = find_event(handle);
    auto stream = find_stream(stream_handle);
    if (!event || !stream || event->context != stream->context) return INVALID_HANDLE;
    event->mark = std::make_shared<Mark>();
    if (is_calling_thread(stream)) {
        event->mark->reach();
    } else {
        stream->enqueue([mark = event->mark] { mark->reach(); });
    }
    return SUCCESS;
}

/// FLOW_FAKE_FAULT=<rank>:<milliseconds>: so long after its first question the device of that
/// rank has failed for good.
bool has_faulted() {
    static const auto begin = std::chrono::steady_clock::now();
    static const long after = [] {
        const char *text = std::getenv("FLOW_FAKE_FAULT"), *own = std::getenv("RANK");
        const char* colon = text ? std::strchr(text, ':') : nullptr;
        return colon && own && std::string(text, colon) == own ? std::atol(colon + 1) : -1;
    }();
    return after >= 0 && std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(after);
}

EXPORT int cuEventQuery(void* handle) {
    if (has_faulted()) return ILLEGAL_ADDRESS;
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    auto event = find_event(handle);
    if (!event) return INVALID_HANDLE;
    return !event->mark || event->mark->is_reached() ? SUCCESS : NOT_READY;
}

EXPORT int cuEventSynchronize(void* handle) {
    std::shared_ptr<Mark> mark;
    {
        Lock lock(driver.mutex);
        if (Result wrong = check_context()) return wrong;
        auto event = find_event(handle);
        if (!event) return INVALID_HANDLE;
        mark = event->mark;
    }
    if (mark) note_wait("cuEventSynchronize"), mark->wait();
    return SUCCESS;
}

EXPORT int cuEventElapsedTime_v2(float* milliseconds, void* start_handle, void* end_handle) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    auto start = find_event(start_handle), end = find_event(end_handle);
    if (!start || !end || !start->timed || !end->timed || !start->mark || !end->mark) return INVALID_HANDLE;
    if (!start->mark->is_reached() || !end->mark->is_reached()) return NOT_READY;
    return *milliseconds = end->mark->milliseconds_since(*start->mark), SUCCESS;
}

ALSO(cuEventElapsedTime, cuEventElapsedTime_v2);

// Memory.

EXPORT int cuMemAlloc_v2(Address* address, size_t bytes) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    if (bytes == 0) return INVALID_VALUE;
    void* memory = nullptr;
    if (posix_memalign(&memory, 512, bytes)) return OUT_OF_MEMORY;
    std::memset(memory, 0xCD, bytes);
    *address = reinterpret_cast<Address>(memory);
    driver.allocations[*address] = bytes;
    return SUCCESS;
}

ALSO(cuMemAlloc, cuMemAlloc_v2);

EXPORT int cuMemFree_v2(Address address) {
    if (address == 0) return SUCCESS;
    {
        Lock lock(driver.mutex);
        if (Result wrong = check_context()) return wrong;
        if (!driver.allocations.count(address)) return INVALID_VALUE;
    }
    synchronize(current);
    Lock lock(driver.mutex);
    auto found = driver.allocations.find(address);
    if (found == driver.allocations.end()) return INVALID_VALUE;
    std::memset(pointer(address), 0xDD, found->second);
    driver.allocations.erase(found);
    std::free(pointer(address));
    return SUCCESS;
}

ALSO(cuMemFree, cuMemFree_v2);

EXPORT int cuMemcpyHtoD_v2(Address to, const void* from, size_t bytes) {
    return submit(nullptr, {to}, bytes, true, copy(pointer(to), from, bytes));
}

ALSO(cuMemcpyHtoD, cuMemcpyHtoD_v2);

EXPORT int cuMemcpyDtoH_v2(void* to, Address from, size_t bytes) {
    return submit(nullptr, {from}, bytes, true, copy(to, pointer(from), bytes));
}

ALSO(cuMemcpyDtoH, cuMemcpyDtoH_v2);

EXPORT int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* stream) {
    return submit(stream, {to}, bytes, false, copy(pointer(to), from, bytes));
}

ALSO(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2);

EXPORT int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* stream) {
    return submit(stream, {from}, bytes, false, copy(to, pointer(from), bytes));
}

ALSO(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2);

EXPORT int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void* stream) {
    return submit(stream, {to, from}, bytes, false, copy(pointer(to), pointer(from), bytes));
}

ALSO(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2);

EXPORT int cuMemsetD8Async(Address to, unsigned char value, size_t bytes, void* stream) {
    return submit(stream, {to}, bytes, false, [=] { if (bytes) std::memset(pointer(to), value, bytes); });
}

EXPORT int cuMemsetD8_v2(Address to, unsigned char value, size_t bytes) { return cuMemsetD8Async(to, value, bytes, nullptr); }

ALSO(cuMemsetD8, cuMemsetD8_v2);

// Kernels: a module is what the fake compiler (nvrtc.cpp) made, and has the kernels of the
// types that its options say.

EXPORT int cuModuleLoadData(Module** module, const void* image) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    std::string text = static_cast<const char*>(image);
    for (std::string start : {"\x7f" "ELF flow fake\n", "// flow fake\n"})
        if (text.compare(0, start.size(), start) == 0) return *module = new Module{text.substr(start.size() - 1)}, SUCCESS;
    return INVALID_IMAGE;
}

EXPORT int cuModuleUnload(Module* module) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    if (!module) return INVALID_HANDLE;
    delete module;
    return SUCCESS;
}

EXPORT int cuModuleGetFunction(const Kernel** function, Module* module, const char* name) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    if (!module) return INVALID_HANDLE;
    const Kernel* kernel = find_kernel(name);
    auto has = [&](const std::string& option) { return module->options.find("\n" + option + "\n") != std::string::npos; };
    if (!kernel || !has("-DTENSORS=" + kernel->tensors) || !has("-DFLAT=" + kernel->flat)) return NOT_FOUND;
    return *function = kernel, SUCCESS;
}

EXPORT int cuLaunchKernel(const Kernel* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                          unsigned block_z, unsigned, void* stream, void** parameters, void** extra) {
    constexpr unsigned most_threads = 1024;
    unsigned long long threads = 1ull * block_x * block_y * block_z;
    if (!kernel) return INVALID_HANDLE;
    if (1ull * grid_x * grid_y * grid_z == 0 || threads == 0 || threads > most_threads || !parameters || extra) return INVALID_VALUE;
    {
        Lock lock(driver.mutex);
        if (Result wrong = check_context()) return wrong;
        auto found = find_stream(stream);
        if (!found || found->context != current) return INVALID_HANDLE;
    }
    return submit(stream, {}, 0, false, kernel->bind({grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, parameters));
}
