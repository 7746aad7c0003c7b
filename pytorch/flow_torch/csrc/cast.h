// Parameters in another type, for a forward and its backward.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "reducer.h"

namespace flow {

// A parameter of the reducer's, which may take its gradient as that is.
struct Cast : torch::autograd::Function<Cast> {
    using Reducer = c10::intrusive_ptr<InPlaceReducer>;

    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& param, at::ScalarType type,
                              const Reducer& reducer, int64_t index) {
        context->set_materialize_grads(false);
        context->saved_data["reducer"] = reducer;
        context->saved_data["index"] = index;
        return param.to(type);
    }

    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list& gradients) {
        auto& gradient = gradients[0];
        if (gradient.defined()) {
            const auto reducer = context->saved_data["reducer"].toCustomClass<InPlaceReducer>();
            gradient = reducer->take(context->saved_data["index"].toInt(), std::move(gradient));
        }
        return {gradient, {}, {}, {}};
    }
};

}  // namespace flow
