// What is needed of an operator's schema.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

namespace flow::global {

struct OpInfo {
    c10::SmallVector<bool, 16> is_optional_tensor, is_written;  // by argument
    c10::SmallVector<int, 4> writes;                            // by return: the argument that it is, or -1
    bool is_view = false, reshapes = false, is_composite = false, is_random = false, is_dynamic = false;
};

// Found out once.
const OpInfo& info_of(const c10::OperatorHandle& op);

}  // namespace flow::global
