// The names of operations: in errors, and, after "flow:", in PyTorch's profiler, which calls those of other backends the same.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace flow {

// Whether somebody looks. If nobody does, an operation costs no time to record.
inline bool is_recorded() {
    return at::hasCallbacks() && at::isRecordFunctionEnabled();
}

constexpr std::string_view kBackend = "flow:";

inline const char* full_name(c10d::OpType type) {
    using c10d::OpType;
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

// The name that the profiler shows.
inline const char* title(c10d::OpType type) {
    return is_recorded() ? full_name(type) : nullptr;
}

// The name that flow-comm's errors show.
inline const char* operation_name(c10d::OpType type) {
    using c10d::OpType;
    switch (type) {
        case OpType::_ALLREDUCE_SPARSE: return "all_reduce";
        case OpType::RECVANYSOURCE: return "recv";
        default: return full_name(type) + kBackend.size();
    }
}

// The tensors of which the profiler notes the shapes.
inline std::optional<std::vector<at::Tensor>> recorded(const std::vector<at::Tensor>& inputs) {
    return is_recorded() ? std::optional(inputs) : std::nullopt;
}

}  // namespace flow
