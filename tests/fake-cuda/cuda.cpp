// A fake of the CUDA driver (libcuda.so.1) on machines without a GPU, for tests of what Flow
// asks of the driver: device memory is host memory, a stream is a thread, kernels run on the CPU
// (kernels.cpp). It shows whether calls are made in the right order with the right arguments. It is
// never a GPU result: it says nothing about speed, nor about what a GPU would compute.
//
// It is stricter than the driver where that finds mistakes: every call needs a current context,
// streams (the null stream too) are never ordered but by events, pageable memory is copied when the
// job runs, and fresh and freed memory is filled with 0xCD and 0xDD. Releasing a primary context
// frees nothing.
//
// This file: the driver, its devices and contexts. cuda_streams.cpp: streams and events;
// cuda_memory.cpp: memory; cuda_modules.cpp: kernels.

#include "driver.h"

namespace {

struct Uuid {
    char bytes[16];
};

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
