// What PyTorch's profiler shows of operations: the names that other backends' have there, after "flow:".
#pragma once

#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace flow {

// Whether somebody looks. If nobody does, an operation costs no time to record.
inline bool is_recorded() {
    return at::hasCallbacks() && at::isRecordFunctionEnabled();
}

inline const char* title(c10d::OpType type) {
    using c10d::OpType;
    if (!is_recorded()) return nullptr;
    switch (type) {
        case OpType::BROADCAST: return "flow:broadcast";
        case OpType::ALLREDUCE:
        case OpType::ALLREDUCE_COALESCED: return "flow:all_reduce";
        case OpType::_ALLREDUCE_SPARSE: return "flow:sparse_all_reduce";
        case OpType::REDUCE: return "flow:reduce";
        case OpType::ALLGATHER:
        case OpType::ALLGATHER_COALESCED:
        case OpType::_ALLGATHER_BASE: return "flow:all_gather";
        case OpType::GATHER: return "flow:gather";
        case OpType::SCATTER: return "flow:scatter";
        case OpType::REDUCE_SCATTER:
        case OpType::_REDUCE_SCATTER_BASE: return "flow:reduce_scatter";
        case OpType::ALLTOALL:
        case OpType::ALLTOALL_BASE: return "flow:all_to_all";
        case OpType::SEND: return "flow:send";
        case OpType::RECV: return "flow:recv";
        case OpType::RECVANYSOURCE: return "flow:recvAnySource";
        case OpType::BARRIER: return "flow:barrier";
        default: return nullptr;
    }
}

// The tensors of which the profiler notes the shapes.
inline std::optional<std::vector<at::Tensor>> recorded(const std::vector<at::Tensor>& inputs) {
    return is_recorded() ? std::optional(inputs) : std::nullopt;
}

}  // namespace flow
