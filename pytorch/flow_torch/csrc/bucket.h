// The reduction of a bucket of gradients: announced before it runs, and reduced where the bucket lies, or in the staging memory.
#pragma once

#include <cstring>
#include <memory>

#include <torch/csrc/autograd/graph_task.h>

#include "memory.h"
#include "operation.h"
#include "tensors.h"

namespace flow {

// Not announced is a bucket for which some rank has no room, or the first of its length. `staging` lives as long as the job.
inline Job bucket_job(const flow_group* here, Staging& staging, const Tensor& tensor, flow_dtype code, RedOp op, uint32_t number) {
    // A tensor that is reduced elsewhere need not be used again.
    if (torch::autograd::get_current_graph_task_id() != -1) share_bucket(here, tensor);
    const bool in_place = flow_is_shared(here, tensor.const_data_ptr(), tensor.nbytes());
    const auto launched = std::make_shared<bool>(false);
    const auto launch = [&staging, code, op, tensor, in_place, number, launched](const flow_group* group) {
        check(flow_progress(group));
        auto piece = elements(tensor, code);
        if (!in_place) {
            piece.data = staging.take();
            if (!piece.data) return false;
            std::memcpy(piece.data, tensor.const_data_ptr(), tensor.nbytes());
        }
        check(flow_launch_bucket(group, &piece, 1, number, flow_op(op), launched.get()));
        if (!in_place && !*launched) staging.give_back();
        return *launched;
    };
    Job job;
    job.launch = [here, &staging, launch, bytes = tensor.nbytes()] { return staging.has_room(bytes) && launch(here); };
    job.run = [&staging, launch, launched, tensor, code, op, in_place](const flow_group* group) {
        if (!*launched && !staging.make_room(group, tensor.nbytes())) {
            return check(flow_all_reduce(group, elements(tensor, code), flow_op(op)));
        }
        if (!*launched && !launch(group)) {
            // Too many were under way.
            check(flow_finish_buckets(group));
            TORCH_CHECK(launch(group), "flow: a bucket cannot be launched");
        }
        check(flow_finish_buckets(group));
        if (!in_place) {
            std::memcpy(tensor.data_ptr(), staging.memory(), tensor.nbytes());
            staging.give_back();
        }
    };
    return job;
}

}  // namespace flow
