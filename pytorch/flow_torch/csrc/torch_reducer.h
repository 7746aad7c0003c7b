// What flow_torch reads and sets in PyTorch's own Reducer.
#pragma once

#include <torch/csrc/distributed/c10d/reducer.hpp>

namespace flow {

// The members that c10d::Reducer keeps for classes derived from it. There are no objects of this one.
struct TorchReducer final : c10d::Reducer {
    static auto& mutex(Reducer& own) { return own.*&TorchReducer::mutex_; }
    static const auto& params(Reducer& own) { return own.*&TorchReducer::params_; }
    static const auto& grad_accumulators(Reducer& own) { return own.*&TorchReducer::grad_accumulators_; }
    static const auto& buckets(Reducer& own) { return own.*&TorchReducer::buckets_; }
    static bool expects_sparse(Reducer& own, size_t index) { return (own.*&TorchReducer::expect_sparse_gradients_).at(index); }
    // The number of ranks that have not joined, which is being counted.
    static const auto& forward_pass_work(Reducer& own) { return own.*&TorchReducer::forwardPassWorkHandle_; }
    // What a hook that shares buffers waits for.
    static auto& installed_futures(Reducer& own) { return own.*&TorchReducer::installed_futures_; }
    static bool has_rebuilt_bucket(Reducer& own) { return own.*&TorchReducer::has_rebuilt_bucket_; }
    static bool finds_unused(Reducer& own) { return own.*&TorchReducer::find_unused_parameters_; }
    static bool skips_unused(Reducer& own) { return own.*&TorchReducer::skip_all_reduce_unused_params_; }
    static const auto& unused(Reducer& own) { return own.*&TorchReducer::unused_parameters_; }
    static auto& local_used_map(Reducer& own) { return own.*&TorchReducer::local_used_map_; }
    static bool is_static(Reducer& own) { return own.*&TorchReducer::static_graph_; }
    static const auto& hooks_of_graph(Reducer& own) { return own.*&TorchReducer::numGradHooksTriggeredMap_; }
    static long backward_calls(Reducer& own) { return own.*&TorchReducer::num_bwd_calls_; }
    static bool& hook_called(Reducer& own) { return own.*&TorchReducer::first_autograd_hook_called_; }
    static bool& expects_hooks(Reducer& own) { return own.*&TorchReducer::expect_autograd_hooks_; }
    static void push_rebuilt(Reducer& own, size_t index) { (own.*&TorchReducer::push_rebuilt_params)(index); }
};

}  // namespace flow
