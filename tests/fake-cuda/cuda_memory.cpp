// Memory of the fake CUDA driver.

#include "driver.h"

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
