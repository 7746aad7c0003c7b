// The sum of sparse tensors: that of everybody's entries.
#pragma once

#include <algorithm>
#include <numeric>

#include "group.h"
#include "tensors.h"

namespace flow {

// An error on all ranks if the sparse tensor is not on all of them what it is on rank 0.
inline void check_alike(const flow_group* group, const Tensor& tensor) {
    const auto size = flow_world_size(group);
    std::vector<int64_t> own(64);
    TORCH_CHECK(tensor.dim() <= static_cast<int64_t>(own.size()) - 3, "flow: a sparse tensor may have 61 dimensions, not ", tensor.dim());
    own[0] = static_cast<int64_t>(tensor.scalar_type());
    own[1] = tensor.sparse_dim();
    own[2] = tensor.dim();
    std::copy(tensor.sizes().begin(), tensor.sizes().end(), own.begin() + 3);
    std::vector<int64_t> all(own.size() * size);
    check(flow_all_gather(group, {own.data(), own.size(), FLOW_I64}, {all.data(), all.size(), FLOW_I64}));
    const auto of = [&](size_t rank) { return at::ArrayRef<int64_t>(all).slice(rank * own.size(), own.size()); };
    const auto shown = [&](size_t rank) {
        const auto its = of(rank);
        return c10::str(its.slice(3, its[2]), " of ", static_cast<at::ScalarType>(its[0]), ", ", its[1], " of the dimensions sparse");
    };
    for (size_t rank = 1; rank < size; ++rank) {
        TORCH_CHECK(of(rank) == of(0), "flow: the sparse tensors of an all_reduce must be alike: rank 0 has ", shown(0), ", and rank ",
                    rank, " has ", shown(rank));
    }
}

inline void sum_sparse(const flow_group* group, const Tensor& tensor) {
    check_alike(group, tensor);
    const auto own = tensor.coalesce();
    int64_t entries = own._nnz();
    std::vector<int64_t> all_entries(flow_world_size(group));
    check(flow_all_gather(group, {&entries, 1, FLOW_I64}, {all_entries.data(), all_entries.size(), FLOW_I64}));
    const auto total = std::accumulate(all_entries.begin(), all_entries.end(), int64_t{0});
    const auto gather = [&](const Tensor& rows) {
        auto shape = rows.sizes().vec();
        shape[0] = total;
        const auto all = at::empty(shape, rows.options());
        const auto unit = elements(all).count / std::max<int64_t>(total, 1);
        std::vector<size_t> counts;
        for (const auto entries : all_entries) counts.push_back(entries * unit);
        check(flow_all_gather_v(group, elements(rows), elements(all), counts.data()));
        return all;
    };
    const auto indices = gather(own.indices().t().contiguous()), values = gather(own.values().contiguous());
    tensor.copy_(at::sparse_coo_tensor(indices.t(), values, tensor.sizes()).coalesce());
}

}  // namespace flow
