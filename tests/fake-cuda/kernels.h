// The kernels of the fake driver, by name.

#pragma once

#include <functional>
#include <string>

struct Size {
    unsigned x, y, z;
};

struct Kernel {
    std::string name, tensors, flat;  // `tensors` and `flat`: what the module must have been compiled with
    /// The job of a launch; the parameters are copied.
    std::function<std::function<void()>(Size grid, Size block, void** parameters)> bind;
};

/// Null if there is none.
const Kernel* find_kernel(const std::string& name);
