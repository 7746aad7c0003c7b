// The type that a program has called an operation with.
#pragma once

#include <ATen/ATen.h>

#include "memory.h"
#include "python.h"

namespace flow {

// torch.distributed makes real numbers of complex ones before it asks a backend. In Python it marks them (complex_numbers.py). What it makes
// in C++ is nothing that Python sees. A real view of complex numbers that a program has made itself is real.
inline at::ScalarType called_type(const at::Tensor& tensor) {
    const auto type = tensor.scalar_type();
    if (!at::isFloatingType(type) || tensor.dim() == 0 || tensor.size(-1) != 2) return type;
    // Of inference mode's tensors it is not known what they are views of.
    const bool may_be_complex = tensor.is_view() ? tensor._base().is_complex() : tensor.is_inference();
    if (!may_be_complex) return type;
    if (!is_seen(tensor)) return tensor.is_view() ? c10::toComplexType(type) : type;
    return call_python<bool, const at::Tensor&>("flow::is_called_complex", tensor) ? c10::toComplexType(type) : type;
}

}  // namespace flow
