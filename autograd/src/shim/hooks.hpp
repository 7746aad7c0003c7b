// What hooks of gradients and global tensors have to do with each other.

#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace flow {

// Gives the gradients that this leaf, a global tensor, gets in backward the leaf's spec.
void box_gradients(const at::Tensor& leaf);

// The gradient with the spec of the leaf; none if it may stay as it is.
std::optional<at::Tensor> boxed_gradient(const at::Tensor& leaf, const at::Tensor& gradient);

}  // namespace flow
