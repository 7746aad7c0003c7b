// Flow's CUDA kernels, compiled for the CPU from the same source as for the GPU. All threads of all
// blocks run one after the other.

#include "kernels.h"

#include <map>
#include <tuple>

#include "halves.h"

#define __global__
#define __device__
#define __grid_constant__
#define __forceinline__ inline
#define _Float16 Half  // not every C++ compiler has it

namespace {

thread_local Size blockIdx, threadIdx, blockDim, gridDim;

std::map<std::string, Kernel>& kernels() {
    static auto& all = *new std::map<std::string, Kernel>;
    return all;
}

template <class Function>
void for_all(Size size, Size& index, Function function) {
    for (index.z = 0; index.z < size.z; ++index.z)
        for (index.y = 0; index.y < size.y; ++index.y)
            for (index.x = 0; index.x < size.x; ++index.x) function();
}

struct Registration {
    template <class... Parameters>
    Registration(const char* operation, const char* from, const char* to, bool pack, void (*kernel)(Parameters...)) {
        auto bind = [kernel](Size grid, Size block, void** parameters) -> std::function<void()> {
            std::tuple<Parameters...> copies = copy<Parameters...>(parameters, std::index_sequence_for<Parameters...>());
            return [=] {
                gridDim = grid;
                blockDim = block;
                for_all(grid, blockIdx, [&] { for_all(block, threadIdx, [&] { std::apply(kernel, copies); }); });
            };
        };
        std::string name = std::string(operation) + "_" + from + "_" + to;
        kernels()[name] = {name, pack ? from : to, pack ? to : from, bind};
    }

    template <class... Parameters, size_t... Index>
    static std::tuple<Parameters...> copy(void** parameters, std::index_sequence<Index...>) {
        return {*static_cast<Parameters*>(parameters[Index])...};
    }
};

}  // namespace

const Kernel* find_kernel(const std::string& name) {
    auto found = kernels().find(name);
    return found == kernels().end() ? nullptr : &found->second;
}

#define TENSORS f32
#include "kernels_of_type.h"
#undef TENSORS
#define TENSORS f64
#include "kernels_of_type.h"
#undef TENSORS
#define TENSORS f16
#include "kernels_of_type.h"
#undef TENSORS
#define TENSORS bf16
#include "kernels_of_type.h"
#undef TENSORS
