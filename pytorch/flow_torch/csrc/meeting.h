// How processes find each other for a group by a store: in Python, as those of a first group do.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "group.h"

namespace flow {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// A process's place in a group that is to be, as Python and C++ hand it to each other. No other type of PyTorch's takes a store there.
inline GroupPtr boxed_place(const StorePtr& store, int rank, int size) { return c10::make_intrusive<c10d::ProcessGroup>(store, rank, size); }

inline StorePtr apart(const StorePtr& store, const std::string& name) { return c10::make_intrusive<c10d::PrefixStore>(name, store); }

// The backend of the group. `call`: the function of PyTorch's that asks for it, for errors. `members`: what all must give alike.
inline c10::intrusive_ptr<c10d::Backend> meet(const StorePtr& store, int rank, int size, Milliseconds timeout, const std::string& call,
                                              const std::string& members = "") {
    const auto place = boxed_place(store, rank, size);
    const auto made = call_python<GroupPtr, GroupPtr, double, std::string, std::string>("flow::meet", place, seconds(timeout), call, members);
    return made->getBackend(c10::DeviceType::CPU);
}

// The ranks that are left of so many without the excluded ones, in ascending order.
inline std::vector<int64_t> ranks_without(const std::vector<int64_t>& excluded, int size) {
    std::vector<int64_t> left;
    for (int64_t rank = 0; rank < size; ++rank) {
        if (std::find(excluded.begin(), excluded.end(), rank) == excluded.end()) left.push_back(rank);
    }
    return left;
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
// The handles by rank. Those of a set, of which the backend chooses the ranks, are in ascending order.
inline std::vector<std::string> in_order(const c10d::ReconfigureOptions& opts) {
    auto handles = std::visit([](const auto& all) { return std::vector<std::string>(all.begin(), all.end()); }, opts.handles);
    auto sorted = handles;
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    TORCH_CHECK_VALUE(twice == sorted.end(), "flow: reconfigure: each handle is to be given once, and ", *twice, " is there twice");
    return std::holds_alternative<std::vector<std::string>>(opts.handles) ? handles : sorted;
}
#endif

}  // namespace flow
