#include "key.hpp"

#include "../hooks.hpp"

using namespace flow::global;

void Key::add(const c10::IValue& value, bool is_optional_tensor) {
    if (value.isTensor()) {
        add(value.toTensor());
    } else if (value.isNone()) {
        note(NONE, is_optional_tensor);
    } else if (value.isInt()) {
        add(value.toInt());
    } else if (value.isDouble()) {
        add(value.toDouble());
    } else if (value.isBool()) {
        add(value.toBool());
    } else if (value.isIntList()) {
        const auto list = value.toListRef();
        note(INTS, list.size());
        for (const auto& item : list) words.push_back(item.toInt());
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
        const auto list = value.toListRef();
        note(TENSORS, list.size());
        for (const auto& item : list) add(item.isNone() ? UNDEFINED : item.toTensor());
    } else if (value.isBoolList()) {
        // As in the mask of the gradients that a backward gives.
        const auto list = value.toBoolList();
        note(OTHER, list.size());
        for (const bool item : list) words.push_back(item);
    } else {
        note(OTHER);
    }
}

void Key::add(const at::Tensor& tensor) {
    if (!tensor.defined()) {
        note(TENSOR);
        return;
    }
    const auto sizes = tensor.sizes();
    uint64_t flags = 1 | tensor.is_conj() << 2 | tensor.is_neg() << 3, spec_id = 0;
    if (is_global(tensor)) {
        const auto& meta = meta_of(tensor);
        if (!spec) spec = meta.spec;
        flags |= meta.detached_view << 1;
        spec_id = meta.spec_id;
        if (tensor.requires_grad() && tensor.is_leaf()) flow::box_gradients(tensor);
    }
    note(TENSOR, flags | static_cast<uint64_t>(tensor.scalar_type()) << 8 | static_cast<uint64_t>(sizes.size()) << 16);
    words.push_back(spec_id);
    words.append(sizes.begin(), sizes.end());
    if (strides) words.append(tensor.strides().begin(), tensor.strides().end());
}
