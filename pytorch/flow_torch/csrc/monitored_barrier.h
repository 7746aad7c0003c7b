// torch.distributed's monitored_barrier: messages to rank 0 and back, so that rank 0 knows who has not come.
#pragma once

#include <algorithm>
#include <chrono>
#include <set>
#include <vector>

#include <c10/util/StringUtil.h>

#include "group.h"

namespace flow {

// The tags of its messages; programs' are smaller.
constexpr uint32_t kArrived = UINT32_MAX;
constexpr uint32_t kPassed = UINT32_MAX - 1;

// The part of the other ranks.
inline void pass_rank_zero(const Group& group, int rank, Milliseconds timeout) {
    uint8_t byte = 0;
    const flow_buffer word{&byte, 1, FLOW_U8};
    const auto patient = within(group, timeout);
    int code = flow_send(patient.get(), word, 0, kArrived);
    if (code == FLOW_OK) code = flow_recv(patient.get(), word, 0, kPassed);
    if (code == FLOW_ERROR_INTERRUPTED) rethrow_interrupt();
    note(code);
    if (code != FLOW_OK) {
        C10_THROW_ERROR(DistBackendError, c10::str("Rank ", rank, " successfully reached monitoredBarrier, but received errors while ",
                                                   "waiting for send/recv from rank 0: ", flow_error_message()));
    }
}

// The part of rank 0.
inline void collect_ranks(const Group& group, int size, Milliseconds timeout, bool wait_all_ranks) {
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + timeout;
    if (timeout <= Milliseconds::zero()) {
        C10_THROW_ERROR(DistBackendError, c10::str("Rank 0 timed out in monitoredBarrier after ", timeout.count(), " ms"));
    }
    uint8_t byte = 0;
    const flow_buffer word{&byte, 1, FLOW_U8};
    std::set<int> missing;
    for (int rank = 1; rank < size; ++rank) missing.insert(rank);
    while (!missing.empty()) {
        const auto left = std::chrono::ceil<Milliseconds>(end - Clock::now());
        size_t from = 0;
        const auto patient = within(group, std::max(left, Milliseconds(1)));
        const int code = flow_recv_any(patient.get(), word, kArrived, &from);
        if (code == FLOW_ERROR_INTERRUPTED) rethrow_interrupt();
        note(code);
        if (code != FLOW_OK) {
            std::vector<int> named(missing.begin(), wait_all_ranks ? missing.end() : std::next(missing.begin()));
            C10_THROW_ERROR(DistBackendError,
                            c10::str(named.size() > 1 ? "Ranks " : "Rank ", c10::Join(", ", named),
                                     " failed to pass monitoredBarrier in ", timeout.count(), " ms: ", flow_error_message()));
        }
        missing.erase(static_cast<int>(from));
    }
    for (int rank = 1; rank < size; ++rank) check(flow_send(group.get(), word, rank, kPassed));
}

// Waits for all ranks. If some are missing, the group is of no more use.
inline void monitored_barrier(const Group& group, int rank, int size, Milliseconds timeout, bool wait_all_ranks) {
    if (rank == 0) {
        collect_ranks(group, size, timeout, wait_all_ranks);
    } else {
        pass_rank_zero(group, rank, timeout);
    }
}

}  // namespace flow
