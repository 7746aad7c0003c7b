// What hooks of gradients and global tensors have to do with each other.

#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace flow {

// Gives the gradients that this leaf, a global tensor, gets in backward the leaf's spec.
void box_gradients(const at::Tensor& leaf);

// The gradient with the spec of the leaf; none if it may stay as it is, undefined if nothing is to be
// accumulated.
std::optional<at::Tensor> boxed_gradient(const at::Tensor& leaf, const at::Tensor& gradient);

// Whether no other tensor uses the memory of this one.
inline bool memory_is_exclusive(const at::Tensor& tensor) {
    const auto& storage = tensor.storage();
    // A view keeps the tensor that it is a view of.
    return tensor.is_view() ? storage.use_count() == 2 && tensor._base().use_count() == 1 : storage.use_count() == 1;
}

}  // namespace flow
