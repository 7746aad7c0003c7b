// flow_comm.h's groups and errors as C++ has them.
#pragma once

#include <chrono>
#include <memory>
#include <optional>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <flow_comm.h>

namespace flow {

using Group = std::shared_ptr<flow_group>;
using Milliseconds = std::chrono::milliseconds;

inline void check(int code) {
    if (code == FLOW_OK) return;
    std::string message = flow_error_message();
    if (code == FLOW_ERROR_TIMEOUT) message += " (the timeout is an argument of init_process_group, new_group and wait)";
    C10_THROW_ERROR(DistBackendError, message);
}

inline Group own(flow_group* group) {
    return {group, flow_leave};
}

inline double seconds(Milliseconds time) {
    return std::chrono::duration<double>(time).count();
}

// The group for an operation with this timeout, of which 0 and less mean the group's own.
inline Group within(const Group& group, Milliseconds timeout) {
    if (timeout <= Milliseconds::zero()) return group;
    flow_group* made = nullptr;
    check(flow_with_timeout(group.get(), seconds(timeout), &made));
    return own(made);
}

inline std::optional<flow_dtype> code_of(at::ScalarType type) {
    switch (type) {
        case at::kFloat: return FLOW_F32;
        case at::kDouble: return FLOW_F64;
        case at::kHalf: return FLOW_F16;
        case at::kBFloat16: return FLOW_BF16;
        case at::kInt: return FLOW_I32;
        case at::kLong: return FLOW_I64;
        case at::kByte: return FLOW_U8;
        default: return std::nullopt;
    }
}

// The type as which flow-comm can reduce this one, if there is any. c10d's codes of these reductions are flow-comm's.
inline std::optional<flow_dtype> reducible(at::ScalarType type, c10d::ReduceOp::RedOpType op) {
    using Op = c10d::ReduceOp;
    static_assert(int(Op::SUM) == FLOW_SUM && int(Op::AVG) == FLOW_AVG && int(Op::PRODUCT) == FLOW_PRODUCT);
    static_assert(int(Op::MIN) == FLOW_MIN && int(Op::MAX) == FLOW_MAX);
    if (op > Op::MAX) return std::nullopt;
    // Of bytes with and without sign the bits of sums and products are the same.
    if (type == at::kChar && (op == Op::SUM || op == Op::PRODUCT)) return FLOW_U8;
    return code_of(type);
}

// The elements of a contiguous tensor. What flow-comm has no type for moves as bytes.
inline flow_buffer elements(const at::Tensor& tensor) {
    const auto code = code_of(tensor.scalar_type());
    const size_t count = code ? tensor.numel() : tensor.nbytes();
    return {tensor.data_ptr(), count, code.value_or(FLOW_U8)};
}

inline flow_buffer elements(const at::Tensor& tensor, flow_dtype code) {
    return {tensor.data_ptr(), static_cast<size_t>(tensor.numel()), code};
}

}  // namespace flow
