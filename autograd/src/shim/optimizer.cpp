// The state of libtorch's optimizers.

#include "shim.hpp"

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace optim = torch::optim;
using flow::check_plain;
using flow::guarded;

namespace {

// A part of what an optimizer keeps for a parameter: a tensor like the parameter, or a count.
struct Part {
    std::string name;
    at::Tensor* tensor;
    int64_t* count;
};

std::unique_ptr<optim::OptimizerParamState> new_state(const optim::OptimizerOptions& options) {
    if (dynamic_cast<const optim::SGDOptions*>(&options)) return std::make_unique<optim::SGDParamState>();
    if (dynamic_cast<const optim::AdamOptions*>(&options)) return std::make_unique<optim::AdamParamState>();
    if (dynamic_cast<const optim::AdamWOptions*>(&options)) return std::make_unique<optim::AdamWParamState>();
    if (dynamic_cast<const optim::RMSpropOptions*>(&options)) return std::make_unique<optim::RMSpropParamState>();
    TORCH_CHECK(false, "this kind of optimizer is not known; SGD, Adam, AdamW and RMSprop are");
}

// The parts of a state that an optimizer with these options uses, with their names in PyTorch.
std::vector<Part> parts(optim::OptimizerParamState& state, const optim::OptimizerOptions& options) {
    const auto of_adam = [](auto& adam, bool amsgrad) {
        std::vector<Part> parts{{"step", nullptr, &adam.step()},
                                {"exp_avg", &adam.exp_avg(), nullptr},
                                {"exp_avg_sq", &adam.exp_avg_sq(), nullptr}};
        if (amsgrad) parts.push_back({"max_exp_avg_sq", &adam.max_exp_avg_sq(), nullptr});
        return parts;
    };
    if (const auto sgd = dynamic_cast<optim::SGDParamState*>(&state)) {
        return {{"momentum_buffer", &sgd->momentum_buffer(), nullptr}};
    }
    if (const auto adam = dynamic_cast<optim::AdamParamState*>(&state)) {
        return of_adam(*adam, dynamic_cast<const optim::AdamOptions&>(options).amsgrad());
    }
    if (const auto adam = dynamic_cast<optim::AdamWParamState*>(&state)) {
        return of_adam(*adam, dynamic_cast<const optim::AdamWOptions&>(options).amsgrad());
    }
    auto& rms = dynamic_cast<optim::RMSpropParamState&>(state);
    const auto& rms_options = dynamic_cast<const optim::RMSpropOptions&>(options);
    std::vector<Part> parts{{"step", nullptr, &rms.step()}, {"square_avg", &rms.square_avg(), nullptr}};
    if (rms_options.momentum() > 0) parts.push_back({"momentum_buffer", &rms.momentum_buffer(), nullptr});
    if (rms_options.centered()) parts.push_back({"grad_avg", &rms.grad_avg(), nullptr});
    return parts;
}

// What decides which parts a state has.
std::string kind(const optim::OptimizerOptions& options) {
    const auto of_adam = [](const std::string& name, bool amsgrad) { return amsgrad ? name + " with amsgrad" : name; };
    if (const auto sgd = dynamic_cast<const optim::SGDOptions*>(&options)) {
        return sgd->momentum() != 0 ? "SGD with momentum" : "SGD";
    }
    if (const auto adam = dynamic_cast<const optim::AdamOptions*>(&options)) return of_adam("Adam", adam->amsgrad());
    if (const auto adam = dynamic_cast<const optim::AdamWOptions*>(&options)) return of_adam("AdamW", adam->amsgrad());
    const auto rms = dynamic_cast<const optim::RMSpropOptions*>(&options);
    TORCH_CHECK(rms, "this kind of optimizer is not known; SGD, Adam, AdamW and RMSprop are");
    const std::string centered = rms->centered() ? "centered RMSprop" : "RMSprop";
    return rms->momentum() > 0 ? centered + " with momentum" : centered;
}

// Calls `run` with each of the optimizer's parameters, its number with a dot, and its options.
template <typename Run>
void each_parameter(const optim::Optimizer& optimizer, Run&& run) {
    size_t number = 0;
    for (const auto& group : optimizer.param_groups()) {
        for (const auto& parameter : group.params()) run(parameter, std::to_string(number++) + ".", group.options());
    }
}

using VisitTensor = void (*)(void* data, const char* name, at::Tensor* tensor);
using VisitText = void (*)(void* data, const char* text);

}  // namespace

extern "C" {

// Calls `visit` for each of the optimizer's parameters with the kind of optimizer, and the
// parameter's shape and type.
char* flow_optimizer_parameters(const optim::Optimizer* optimizer, void* data, VisitText visit) {
    return guarded([&] {
        each_parameter(*optimizer, [&](const at::Tensor& parameter, const std::string&, const auto& options) {
            const auto text = c10::str(kind(options), " of ", parameter.sizes(), " ", parameter.scalar_type());
            visit(data, text.c_str());
        });
    });
}

// Calls `visit`, which owns the tensor that it gets, with each part of the optimizer's state, or a copy.
char* flow_optimizer_state(const optim::Optimizer* optimizer, bool copy, void* data, VisitTensor visit) {
    return guarded([&] {
        const auto& states = optimizer->state();
        each_parameter(*optimizer, [&](const at::Tensor& parameter, const std::string& number, const auto& options) {
            const auto state = states.find(parameter.unsafeGetTensorImpl());
            if (state == states.end()) return;
            for (const auto& part : parts(*state->second, options)) {
                auto value = part.count ? at::scalar_tensor(*part.count, at::kLong) : part.tensor->detach();
                if (copy && part.tensor) value = value.clone();
                visit(data, (number + part.name).c_str(), new at::Tensor(value));
            }
        });
    });
}

// Replaces the optimizer's state by these tensors, or copies, which have the names that
// `flow_optimizer_state` uses. Does nothing if they do not fit.
char* flow_set_optimizer_state(optim::Optimizer* optimizer, bool copy, const char* const* names,
                               const at::Tensor* const* tensors, size_t count) {
    return guarded([&] {
        std::unordered_map<std::string, const at::Tensor*> given;
        for (size_t i = 0; i < count; ++i) given.emplace(names[i], tensors[i]);

        std::remove_reference_t<decltype(optimizer->state())> states;
        each_parameter(*optimizer, [&](const at::Tensor& parameter, const std::string& number, const auto& options) {
            auto state = new_state(options);
            const auto wanted = parts(*state, options);
            const auto is_given = [&](const Part& part) { return given.count(number + part.name) > 0; };
            if (std::none_of(wanted.begin(), wanted.end(), is_given)) return;  // had no gradient yet
            for (const auto& part : wanted) {
                TORCH_CHECK(is_given(part), "the state lacks ", number, part.name);
                const at::Tensor* const tensor = given.extract(number + part.name).mapped();
                // Global tensors may have no memory of their own.
                if (parameter.has_storage()) check_plain(*tensor, number + part.name + " ");
                const at::Tensor value = tensor->detach();
                if (part.count) {
                    TORCH_CHECK(value.dim() == 0 && value.scalar_type() == at::kLong, number, part.name, " is not a count");
                    *part.count = value.item<int64_t>();
                } else {
                    TORCH_CHECK(value.sizes() == parameter.sizes() && value.scalar_type() == parameter.scalar_type(), number,
                                part.name, " has shape ", value.sizes(), " and type ", value.scalar_type(),
                                ", its parameter has ", parameter.sizes(), " and ", parameter.scalar_type());
                    *part.tensor = value.to(parameter.device(), parameter.scalar_type(), false, copy);
                }
            }
            states.emplace(parameter.unsafeGetTensorImpl(), std::move(state));
        });
        TORCH_CHECK(given.empty(), "the state has ", given.begin()->first, ", which the optimizer has no place for");
        optimizer->state() = std::move(states);
    });
}

}  // extern "C"
