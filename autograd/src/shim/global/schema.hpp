// What is needed of an operator's schema.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

namespace flow::global {

struct OpInfo {
    c10::SmallVector<bool, 16> is_optional_tensor, is_written, is_out;  // by argument; an `out` only receives a result
    c10::SmallVector<int, 4> writes;                            // by return: the argument that it is, or -1
    bool is_view = false, reshapes = false, is_composite = false, is_random = false, is_dynamic = false;
    bool gives_tensors = true;    // and no numbers
    bool wants_viewable = false;  // fails on a tensor whose elements lie in another order
    const void* id = nullptr;     // of the operator
    size_t argument_count = 0;
};

// Found out once.
const OpInfo& info_of(const c10::OperatorHandle& op);

}  // namespace flow::global
