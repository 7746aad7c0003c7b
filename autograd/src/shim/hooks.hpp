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

// Makes a gradient that nobody else has forget what it is a view of: it would keep that tensor, and
// those between, and so their memory would look as if it were used.
inline void forget_base(const at::Tensor& gradient) {
    if (gradient.use_count() == 1 && gradient.is_view() && !gradient.requires_grad()) gradient.unsafeGetTensorImpl()->set_autograd_meta(nullptr);
}

}  // namespace flow
