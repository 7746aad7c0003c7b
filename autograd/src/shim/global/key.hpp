// What decides how an operation is carried out.

#pragma once

#include <cmath>

#include <ATen/core/ivalue.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/SmallVector.h>

#include "schema.hpp"
#include "tensor.hpp"

namespace flow::global {

enum Tag : uint8_t { NONE, TENSOR, TENSORS, INT, FLOAT, BOOL, INTS, OTHER };

// The operator, kinds, sizes and specs of tensors (and strides, for views), and arguments. Of numbers
// with a fraction only whether they are zero, and whether they are finite. Arguments make the same words boxed and unboxed.
struct Key {
    c10::SmallVector<uint64_t, 64> words;
    const void* spec = nullptr;  // of the first global tensor; null if all are plain

    explicit Key(const OpInfo& info) : strides(info.is_view) { words.push_back(reinterpret_cast<uint64_t>(info.id)); }

    void add(const c10::IValue& value, bool is_optional_tensor);

    void add(const at::Tensor& tensor);
    void add(const std::optional<at::Tensor>& tensor) {
        if (tensor) add(*tensor);
        else note(NONE, true);
    }
    void add(bool value) { note(BOOL, value); }
    void add(int64_t value) {
        note(INT);
        words.push_back(value);
    }
    void add(double value) { note(FLOAT, (value == 0.0) | !std::isfinite(value) << 1); }
    void add(const at::Scalar& value) {
        if (value.isFloatingPoint()) add(value.toDouble());
        else if (value.isBoolean()) add(value.toBool());
        else if (value.isIntegral(false)) add(value.toLong());
        else note(OTHER);
    }
    void add(c10::IntArrayRef list) {
        note(INTS, list.size());
        words.append(list.begin(), list.end());
    }
    void add(c10::SymIntArrayRef list) { add(C10_AS_INTARRAYREF_SLOW(list)); }
    void add(const at::OptionalIntArrayRef& list) {
        if (list) add(*list);
        else note(NONE);
    }
    template <typename T>
    void add(const T& value) {
        add(c10::IValue(value), false);
    }

private:
    const bool strides;

    void note(Tag tag, uint64_t count = 0) { words.push_back(tag | count << 8); }
};

}  // namespace flow::global
