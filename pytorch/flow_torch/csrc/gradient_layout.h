// How gradients lie in memory.
#pragma once

#include <cstring>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/TensorUtils.h>

#include "tensors.h"

namespace flow {

// The strides that PyTorch gives gradients of the parameter, as a rule: its own, if it lies without gaps.
inline std::vector<int64_t> layout_of(const at::Tensor& param) {
    return param.is_non_overlapping_and_dense() ? param.strides().vec() : at::detail::defaultStrides(param.sizes());
}

inline bool has_layout(const at::Tensor& tensor, at::IntArrayRef strides) {
    for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
        if (tensor.size(axis) != 1 && tensor.stride(axis) != strides[axis]) return false;
    }
    return true;
}

// Of complex numbers both parts.
inline flow_buffer real_elements(const at::Tensor& tensor) {
    const size_t parts = tensor.is_complex() ? 2 : 1;
    return {tensor.data_ptr(), tensor.numel() * parts, code_of(c10::toRealValueType(tensor.scalar_type())).value()};
}

inline void copy_elements(const at::Tensor& to, const at::Tensor& from) {
    const bool is_alike = to.scalar_type() == from.scalar_type() && has_layout(to, from.strides());
    if (is_alike && to.is_neg() == from.is_neg() && to.is_conj() == from.is_conj()) {
        std::memcpy(to.data_ptr(), from.const_data_ptr(), from.nbytes());
    } else {
        to.copy_(from);
    }
}

// Whether nothing else uses the memory of a gradient that has just been accumulated. `incoming` is what came.
inline bool is_exclusive(const at::Tensor& gradient, const at::Tensor& incoming) {
    const auto& storage = gradient.storage();
    const bool was_taken = incoming.defined() && incoming.has_storage() && incoming.storage().is_alias_of(storage);
    if (!was_taken) return storage.use_count() == 1;
    // Only the engine has it, or it would not have been taken. What it is a view of goes with it, and would look like another user.
    if (incoming.is_view() && !incoming.requires_grad()) {
        incoming.unsafeGetTensorImpl()->set_autograd_meta(nullptr);
    }
    return storage.use_count() == 2;
}

}  // namespace flow
