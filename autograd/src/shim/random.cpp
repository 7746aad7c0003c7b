// The state of libtorch's random number generators.

#include "shim.hpp"

#include <mutex>

#include <ATen/Context.h>

using flow::guarded;

namespace {

// The default generator of the device that a tensor is on.
at::Generator generator_of(const at::Tensor& like) {
    return at::globalContext().defaultGenerator(like.device());
}

}  // namespace

extern "C" {

// The state of the generator of the tensor's device, as a new tensor.
char* flow_rng_state(const at::Tensor* like, at::Tensor** state) {
    return guarded([&] {
        auto generator = generator_of(*like);
        const std::lock_guard<std::mutex> guard(generator.mutex());
        *state = new at::Tensor(generator.get_state());
    });
}

char* flow_set_rng_state(const at::Tensor* like, const at::Tensor* state) {
    return guarded([&] {
        auto generator = generator_of(*like);
        const std::lock_guard<std::mutex> guard(generator.mutex());
        generator.set_state(*state);
    });
}

}  // extern "C"
