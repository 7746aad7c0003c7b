// Tensors in whose place operations take others.

#pragma once

#include <ATen/core/Tensor.h>

namespace flow {

// The tensor that operations of this thread take in place of this one: often the tensor itself.
const at::Tensor& replaced(const at::Tensor& tensor);

}  // namespace flow
