// flow_comm.h's groups and errors as C++ has them.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <flow_comm.h>

#include "python.h"

namespace flow {

using Group = std::shared_ptr<flow_group>;
using Milliseconds = std::chrono::milliseconds;

// What this process has seen of the communication, for flow_torch.Elastic.
struct Seen {
    // Operations that have begun.
    static inline std::atomic<int64_t> operations{0};
    // Errors of which another rank may be the cause, and without which it could go on.
    static inline std::atomic<int64_t> losses{0};
};

inline void note(int code) {
    if (code == FLOW_ERROR_PEER_LOST || code == FLOW_ERROR_POISONED || code == FLOW_ERROR_TIMEOUT) ++Seen::losses;
}

inline void check(int code) {
    if (code == FLOW_OK) return;
    note(code);
    if (code == FLOW_ERROR_INTERRUPTED) rethrow_interrupt();
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

// The group for an operation that errors call something else than flow-comm does, or on elements that they do; see `label`.
inline Group with_label(const Group& group, const char* operation, const std::string& elements) {
    flow_group* made = nullptr;
    check(flow_with_label(group.get(), operation, elements.c_str(), &made));
    return own(made);
}

}  // namespace flow
