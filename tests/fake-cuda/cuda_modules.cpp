// Kernels: a module is what the fake compiler (nvrtc.cpp) made, and has the kernels of the
// types that its options say.

#include "driver.h"
#include "kernels.h"

struct Module {
    std::string options;
};

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
