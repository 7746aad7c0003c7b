// Unboxed kernels. A boxed kernel puts arguments on a stack, and takes results from one: that costs
// more than all else that a known operation on small tensors needs.

#include <array>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <ATen/Operators.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "call.hpp"

using namespace flow::global;

namespace {

// How many results are not arguments.
template <typename Result>
constexpr size_t RESULTS = std::is_reference_v<Result> ? 0 : 1;
template <typename... Results>
constexpr size_t RESULTS<std::tuple<Results...>> = sizeof...(Results);

template <typename Op, typename Schema = typename Op::schema>
struct Unboxed;

// A call of an operator that returns tensors or, in place, its first argument.
template <typename Op, typename Result, typename... Args>
struct Unboxed<Op, Result(Args...)> final : FastCall {
    static Result kernel(c10::DispatchKeySet keys, Args... args) {
        static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
        static const OpInfo info = info_of(op);
        {
            c10::AutogradState::get_tls_state().set_view_replay_enabled(true);  // as the boxed kernel does
            c10::impl::ExcludeDispatchKeyGuard below(BELOW);
            Unboxed call(info, args...);
            if (call.key.spec && run_if_known(call)) return call.returned();
        }
        static const auto boxed = c10::KernelFunction::makeFromBoxedFunction<&flow::global::kernel>();
        return boxed.call<Result, Args...>(op, keys, std::forward<Args>(args)...);
    }

    explicit Unboxed(const OpInfo& info, Args&... args) : FastCall(info), args(args...) { (key.add(args), ...); }

    void set_integers(size_t argument, c10::IntArrayRef values) override {
        TORCH_CHECK(argument < lists.size(), Op::name, " has no argument ", argument);
        lists[argument] = values;
    }

    void run_fast() override { run(std::index_sequence_for<Args...>()); }

    void give(size_t index, const OutputView& output) override {
        auto& result = results.at(index);
        if (result.defined()) result = wrap_result(std::move(result), output);
    }

private:
    static constexpr bool HAS_LISTS = ((std::is_same_v<Args, c10::SymIntArrayRef> || std::is_same_v<Args, c10::IntArrayRef>) || ...);

    std::tuple<Args&...> args;
    std::array<std::optional<c10::IntArrayRef>, HAS_LISTS ? sizeof...(Args) : 0> lists;  // set in place of arguments
    std::array<at::Tensor, RESULTS<Result>> results;

    // What the operation runs on.
    template <size_t I, typename T>
    decltype(auto) local(T& value) {
        using Value = std::remove_const_t<T>;
        if constexpr (std::is_same_v<Value, at::Tensor>) {
            return static_cast<T&>(is_global(value) ? meta_of(value).local : value);
        } else if constexpr (std::is_same_v<Value, std::optional<at::Tensor>>) {
            return value && is_global(*value) ? Value(meta_of(*value).local) : value;
        } else if constexpr (std::is_same_v<Value, c10::SymIntArrayRef>) {
            return lists[I] ? c10::fromIntArrayRefUnchecked(*lists[I]) : value;
        } else if constexpr (std::is_same_v<Value, c10::IntArrayRef>) {
            return lists[I].value_or(value);
        } else {
            return static_cast<T&>(value);
        }
    }

    template <size_t... I>
    void run(std::index_sequence<I...>) {
        if constexpr (std::is_same_v<Op, at::_ops::view> || std::is_same_v<Op, at::_ops::_unsafe_view>) {
            const auto sizes = local<1>(std::get<1>(args));
            results[0] = Op::call(viewable(local<0>(std::get<0>(args)), C10_AS_INTARRAYREF_SLOW(sizes)), sizes);
        } else if constexpr (std::is_reference_v<Result>) {
            Op::call(local<I>(std::get<I>(args))...);
        } else if constexpr (std::is_same_v<Result, at::Tensor>) {
            results[0] = Op::call(local<I>(std::get<I>(args))...);
        } else {
            std::apply([&](auto&&... all) { results = {std::move(all)...}; }, Op::call(local<I>(std::get<I>(args))...));
        }
    }

    Result returned() {
        if constexpr (std::is_reference_v<Result>) return std::get<0>(args);
        else if constexpr (std::is_same_v<Result, at::Tensor>) return std::move(results[0]);
        else return std::apply([](auto&... all) { return Result(std::move(all)...); }, results);
    }
};

using Make = torch::CppFunction (*)();

template <typename... Ops>
std::unordered_map<std::string, Make> kernels_of() {
    const auto name = [](const std::string& full, const std::string& overload) {
        return full.substr(sizeof("aten::") - 1) + (overload.empty() ? "" : "." + overload);
    };
    return {{name(Ops::name, Ops::overload_name), [] { return torch::CppFunction(TORCH_FN(Unboxed<Ops>::kernel)); }}...};
}

}  // namespace

std::optional<torch::CppFunction> flow::global::unboxed_kernel(const std::string& name) {
    namespace ops = at::_ops;
    // Of forward, of backward, and of optimizers.
    static const auto kernels = kernels_of<
        ops::add_Tensor, ops::sub_Tensor, ops::mul_Tensor, ops::div_Tensor, ops::add_Scalar, ops::mul_Scalar, ops::div_Scalar, ops::neg, ops::exp,
        ops::pow_Tensor_Scalar, ops::rsqrt, ops::sqrt, ops::tanh, ops::sigmoid, ops::relu, ops::gelu, ops::silu, ops::mm, ops::bmm, ops::addmm,
        ops::baddbmm, ops::t, ops::transpose_int, ops::permute, ops::view, ops::_unsafe_view, ops::expand, ops::unsqueeze, ops::squeeze_dim,
        ops::select_int, ops::slice_Tensor, ops::detach, ops::clone, ops::_to_copy, ops::sum, ops::sum_dim_IntList, ops::mean, ops::mean_dim,
        ops::_softmax, ops::_log_softmax, ops::native_layer_norm, ops::mse_loss, ops::nll_loss_forward, ops::embedding, ops::ones_like,
        ops::zeros_like, ops::threshold_backward, ops::gelu_backward, ops::silu_backward, ops::tanh_backward, ops::sigmoid_backward,
        ops::_softmax_backward_data, ops::_log_softmax_backward_data, ops::native_layer_norm_backward, ops::mse_loss_backward, ops::nll_loss_backward,
        ops::add__Tensor, ops::add__Scalar, ops::sub__Tensor, ops::mul__Tensor, ops::mul__Scalar, ops::div__Tensor, ops::div__Scalar, ops::addcmul_,
        ops::addcdiv_, ops::sqrt_, ops::zero_, ops::fill__Scalar, ops::copy_>();
    const auto found = kernels.find(name);
    if (found == kernels.end()) return std::nullopt;
    return found->second();
}
