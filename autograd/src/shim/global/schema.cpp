#include "schema.hpp"

#include <unordered_map>

#include <ATen/core/enum_tag.h>

using c10::DispatchKey;
using flow::global::OpInfo;

namespace {

OpInfo read(const c10::OperatorHandle& op) {
    OpInfo info;
    const auto& schema = op.schema();
    const auto& arguments = schema.arguments();
    for (const auto& argument : arguments) {
        const auto optional = argument.type()->cast<c10::OptionalType>();
        info.is_optional_tensor.push_back(optional && optional->getElementType()->kind() == c10::TypeKind::TensorType);
        info.is_written.push_back(argument.alias_info() && argument.alias_info()->isWrite());
        // What is written besides is `self`, or running statistics.
        info.is_out.push_back(info.is_written.back() && argument.kwarg_only());
    }
    info.id = &schema;
    info.argument_count = arguments.size();
    const bool is_view = schema.name() == "aten::view" && schema.overload_name().empty();
    info.wants_viewable = is_view || schema.name() == "aten::_unsafe_view";
    for (const auto& value : schema.returns()) {
        const auto kind = value.type()->kind();
        info.gives_tensors &= kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
        const auto* alias = value.alias_info();
        int written = -1;
        if (alias && alias->isWrite()) {
            for (size_t i = 0; i < arguments.size(); ++i) {
                const auto* other = arguments[i].alias_info();
                if (other && other->isWrite() && other->beforeSets() == alias->beforeSets()) written = static_cast<int>(i);
            }
        } else if (alias) {
            info.is_view = true;
        }
        info.writes.push_back(written);
    }
    for (const char* name : {"aten::t_", "aten::transpose_", "aten::squeeze_", "aten::unsqueeze_", "aten::swapaxes_", "aten::swapdims_"}) {
        info.reshapes |= schema.name() == name;
    }
    info.is_dynamic = op.hasTag(at::Tag::dynamic_output_shape);
    info.is_random = op.hasTag(at::Tag::nondeterministic_seeded);
    info.is_composite = op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) && !op.hasKernelForDispatchKey(DispatchKey::CPU);
    return info;
}

}  // namespace

const OpInfo& flow::global::info_of(const c10::OperatorHandle& op) {
    thread_local std::unordered_map<const void*, OpInfo> infos;
    const void* const id = &op.schema();
    const auto found = infos.find(id);
    return found != infos.end() ? found->second : infos.emplace(id, read(op)).first->second;
}
