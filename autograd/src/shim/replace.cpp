// Tensors in whose place operations take others: what libtorch's autocast does with casts, here with
// tensors that the caller gives. It happens above autograd, so that the graph has the others only.

#include "replace.hpp"
#include "shim.hpp"

#include <unordered_map>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

using flow::guarded;
using flow::TensorSlice;

namespace {

// A key of a mode above autograd that libtorch has for libraries and registers nothing for, in 2.11 and
// 2.13.
constexpr auto REPLACING = c10::DispatchKey::DeferredInit;

// The tensors, by what all handles to one have in common, with the others.
struct Replacements {
    std::unordered_map<const c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> tensors;
};

thread_local const Replacements* current = nullptr;

// The tensor to take in place of this one; null if there is none.
const at::Tensor* find(const at::Tensor& tensor) {
    if (!current) return nullptr;
    const auto found = current->tensors.find(tensor.unsafeGetTensorImpl());
    return found == current->tensors.end() ? nullptr : &found->second.second;
}

template <typename List>
bool replace_in(List& list) {
    bool changed = false;
    for (auto& item : list) {
        at::Tensor* tensor;
        if constexpr (std::is_same_v<typename List::value_type, at::Tensor>) {
            tensor = &item;
        } else {
            tensor = item ? &*item : nullptr;
        }
        if (const auto other = tensor ? find(*tensor) : nullptr) {
            *tensor = *other;
            changed = true;
        }
    }
    return changed;
}

// Takes the place of an argument that is to be replaced. Returns whether it did.
bool replace(c10::IValue& value) {
    if (value.isTensor()) {
        const auto other = find(value.toTensor());
        if (other) value = *other;
        return other;
    }
    if (value.isTensorList()) {
        auto list = value.toTensorVector();
        const bool changed = replace_in(list);
        if (changed) value = std::move(list);
        return changed;
    }
    if (value.isOptionalTensorList()) {
        auto list = value.toOptionalTensorVector();
        const bool changed = replace_in(list);
        if (changed) value = std::move(list);
        return changed;
    }
    return false;
}

void replace_arguments(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard below(REPLACING);
    const auto& arguments = op.schema().arguments();
    const auto first = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
        const auto alias = arguments[i].alias_info();
        const bool writes = alias && alias->isWrite();
        TORCH_CHECK(!replace((*stack)[first + i]) || !writes, op.schema().name(),
                    " would change a tensor that others use in its place: change it outside of forward");
    }
    op.callBoxed(stack);
}

// Has all operations come here first, in threads that ask for it.
void register_replacing() {
    static const auto library = [] {
        auto library = new torch::Library(torch::Library::IMPL, "_", REPLACING, __FILE__, __LINE__);
        library->fallback(torch::CppFunction::makeFromBoxedFunction<&replace_arguments>());
        return library;
    }();
    static_cast<void>(library);
}

}  // namespace

const at::Tensor& flow::replaced(const at::Tensor& tensor) {
    const auto other = find(tensor);
    return other ? *other : tensor;
}

extern "C" {

// Makes replacements: each tensor of `others` is taken in place of that of `tensors` at the same place. And those of
// `more`, unless it is null.
char* flow_replacements_new(TensorSlice tensors, TensorSlice others, const Replacements* more,
                            const Replacements** result) {
    return guarded([&] {
        register_replacing();
        auto made = more ? std::make_unique<Replacements>(*more) : std::make_unique<Replacements>();
        for (size_t i = 0; i < tensors.count; ++i) {
            made->tensors[tensors.tensors[i]->unsafeGetTensorImpl()] = {*tensors.tensors[i], *others.tensors[i]};
        }
        *result = made.release();
    });
}

void flow_replacements_drop(const Replacements* replacements) { delete replacements; }

// Has operations of this thread make these replacements, or none if null. Returns those before.
const Replacements* flow_set_replacements(const Replacements* replacements) {
    c10::impl::tls_set_dispatch_key_included(REPLACING, replacements != nullptr);
    return std::exchange(current, replacements);
}

}  // extern "C"
