// Global tensors: ordinary tensors with the logical sizes, whose elements lie on many ranks.
//
// A global tensor is a stock TensorImpl with one dispatch key more, below autograd. Its BackendMeta,
// which every shallow copy shares, holds this rank's local tensor and the spec, a value of Rust's.
// Every operation on such a tensor comes to `kernel`, which hands it to Rust. Autograd sees logical
// tensors only, and its formulas are again operations on global tensors.

#include "shim.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/InferSize.h>
#include <ATen/SequenceNumber.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/AutogradState.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/headeronly/version.h>
#include <torch/library.h>

#include "hooks.hpp"

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using flow::guarded;
using torch::jit::Stack;

namespace {

// A key of a functorch mode that no tensor of libtorch's carries, in these versions.
constexpr auto KEY = DispatchKey::FuncTorchDynamicLayerBackMode;
constexpr int OLDEST_MINOR = 11, NEWEST_MINOR = 13;

// Flat values for Rust. Strides, sizes and lists live as long as the call.
struct TensorView {
    const at::Tensor* tensor;
    const int64_t* sizes;
    const int64_t* strides;
    const void* spec;  // Rust's; null for a plain tensor
    int32_t dims;
    int8_t kind;  // c10::ScalarType
    bool defined, detached_view;
};

enum Tag : uint8_t { NONE, TENSOR, TENSORS, INT, FLOAT, BOOL, INTS, OTHER };

struct Argument {
    int64_t integer;
    double number;
    const int64_t* integers;
    uint32_t first, count;  // of tensors, or the length of a list
    Tag tag;
    bool written;
};

struct ScalarView {
    Tag tag;
    int64_t integer;
    double number;
};

struct Call;

struct CallView {
    Call* call;
    const char* name;
    const char* overload;
    const void* id;  // of the operator
    const Argument* arguments;
    const TensorView* tensors;
    size_t argument_count, tensor_count, return_count;
    bool is_view, reshapes, is_random, is_dynamic;
};

// Rust's part.
struct Callbacks {
    char* (*dispatch)(const CallView* call);
    // Null if the gradient may stay as it is. `taken`, if it may be: nothing is to be accumulated.
    // `exclusive`: nothing else uses the gradient's memory.
    char* (*gradient)(const at::Tensor* leaf, const at::Tensor* gradient, bool may_take, bool exclusive, at::Tensor** boxed, bool* taken);
    void (*drop_spec)(const void* spec);
};
Callbacks callbacks{};

struct GlobalMeta final : c10::BackendMeta {
    GlobalMeta(at::Tensor local, const void* spec) : local(std::move(local)), spec(spec) {}
    GlobalMeta(const GlobalMeta&) = delete;
    GlobalMeta& operator=(const GlobalMeta&) = delete;
    ~GlobalMeta() override { callbacks.drop_spec(spec); }

    const at::Tensor local;  // undefined on ranks outside the placement
    const void* const spec;
    // A view of another tensor that had to be boxed: it does not share that tensor's memory.
    bool detached_view = false;
    // A number of the tensor's own, once somebody has asked for it.
    std::atomic<uint64_t> id{0};
};

bool is_global(const at::TensorBase& tensor) {
    return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(KEY);
}

GlobalMeta& meta_of(const at::TensorBase& tensor) {
    return *static_cast<GlobalMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

DispatchKeySet autocast_key(c10::DeviceType device) {
    return DispatchKeySet(device == c10::kCUDA ? DispatchKey::AutocastCUDA : DispatchKey::AutocastCPU);
}

// The device's own key makes libtorch accept the tensor for `set_data` of a plain one. The key Meta
// makes composite operations and backward formulas choose their out-of-place branches.
DispatchKeySet keys_of(c10::Device device) {
    const auto own = device.type() == c10::kCUDA ? DispatchKey::CUDA : DispatchKey::CPU;
    return DispatchKeySet({own, DispatchKey::Meta, KEY}) | autocast_key(device.type());
}

const auto BELOW = c10::autograd_dispatch_keyset_with_ADInplaceOrView | DispatchKeySet(KEY);

// A tensor's sizes and where its elements are, as far as global tensors have that.
struct Geometry {
    c10::IntArrayRef sizes;
    c10::IntArrayRef strides;  // empty: contiguous
};

void set_geometry(c10::TensorImpl* impl, const Geometry& geometry, const at::Tensor& local, bool shares) {
    if (shares) {
        // All ranks have all of it: so data_ptr, printing and saving just work.
        impl->set_storage_keep_dtype(local.storage());
        impl->set_storage_offset(local.storage_offset());
        impl->set_sizes_and_strides(local.sizes(), local.strides());
        return;
    }
    if (geometry.strides.size() == geometry.sizes.size()) impl->set_sizes_and_strides(geometry.sizes, geometry.strides);
    else impl->set_sizes_contiguous(geometry.sizes);
    if (impl->device().is_cuda()) {
        // The engine records streams on the storage of tensors on GPUs.
        impl->set_storage_keep_dtype(c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, impl->device())));
    } else {
        impl->release_storage_and_set_meta_custom_data_ptr_error_msg_(
            "a global tensor has no memory of its own: use full() for the logical value, or to_local()");
    }
}

at::Tensor wrap(at::Tensor local, const void* spec, const Geometry& geometry, caffe2::TypeMeta kind, c10::Device device, bool shares) {
    auto meta = c10::make_intrusive<GlobalMeta>(std::move(local), spec);
    auto impl = c10::make_intrusive<c10::TensorImpl>(keys_of(device), kind, device);
    set_geometry(impl.get(), geometry, meta->local, shares);
    impl->set_backend_meta(std::move(meta));
    return at::Tensor(std::move(impl));
}

// What is needed of an operator's schema, once.
struct OpInfo {
    c10::SmallVector<bool, 16> is_optional_tensor, is_written;  // by argument
    c10::SmallVector<int, 4> writes;                            // by return: the argument that it is, or -1
    bool is_view = false, reshapes = false, is_composite = false, is_random = false, is_dynamic = false;
};

OpInfo info_of(const c10::OperatorHandle& op) {
    OpInfo info;
    const auto& schema = op.schema();
    const auto& arguments = schema.arguments();
    for (const auto& argument : arguments) {
        const auto optional = argument.type()->cast<c10::OptionalType>();
        info.is_optional_tensor.push_back(optional && optional->getElementType()->kind() == c10::TypeKind::TensorType);
        info.is_written.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    }
    for (const auto& value : schema.returns()) {
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

const OpInfo& cached_info_of(const c10::OperatorHandle& op) {
    thread_local std::unordered_map<const void*, OpInfo> infos;
    const void* const id = &op.schema();
    const auto found = infos.find(id);
    return found != infos.end() ? found->second : infos.emplace(id, info_of(op)).first->second;
}

const at::Tensor UNDEFINED;

struct Quiet final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
};

// One operation on its way.
struct Call {
    const c10::OperatorHandle& op;
    const OpInfo& info;
    Stack& stack;
    const size_t count;
    IValue* const values;
    bool any_global = false;
    c10::SmallVector<Argument, 12> arguments;
    c10::SmallVector<TensorView, 8> tensors;
    c10::SmallVector<at::Tensor, 8> locals;  // by tensor: what the operation runs on
    std::vector<std::vector<int64_t>> lists; // lists live in IValues as boxed ones: copied
    c10::SmallVector<IValue, 4> results;     // of the local operation
    std::vector<IValue> outputs;             // for the caller

    Call(const c10::OperatorHandle& op, const OpInfo& info, Stack& stack)
        : op(op), info(info), stack(stack), count(op.schema().arguments().size()), values(stack.data() + (stack.size() - count)) {
        for (size_t i = 0; i < count; ++i) add(i);
        size_t next = 0;
        for (auto& argument : arguments) {
            if (argument.tag == INTS) argument.integers = lists[next++].data();
        }
    }

    void add(size_t index) {
        const auto& value = values[index];
        Argument argument{};
        argument.first = static_cast<uint32_t>(tensors.size());
        argument.written = info.is_written[index];
        if (value.isTensor() || (value.isNone() && info.is_optional_tensor[index])) {
            const at::Tensor& tensor = value.isNone() ? UNDEFINED : value.toTensor();
            argument.tag = tensor.defined() ? TENSOR : NONE;
            argument.count = 1;
            add(tensor);
        } else if (value.isNone()) {
            argument.tag = NONE;
        } else if (value.isInt()) {
            argument.tag = INT;
            argument.integer = value.toInt();
        } else if (value.isDouble()) {
            argument.tag = FLOAT;
            argument.number = value.toDouble();
        } else if (value.isBool()) {
            argument.tag = BOOL;
            argument.integer = value.toBool();
        } else if (value.isIntList()) {
            lists.push_back(value.toIntVector());
            argument.tag = INTS;
            argument.count = static_cast<uint32_t>(lists.back().size());
        } else if (value.isTensorList() || value.isOptionalTensorList()) {
            const auto list = value.toListRef();
            argument.tag = TENSORS;
            argument.count = static_cast<uint32_t>(list.size());
            for (const auto& item : list) add(item.isNone() ? UNDEFINED : item.toTensor());
        } else {
            argument.tag = OTHER;
        }
        arguments.push_back(argument);
    }

    void add(const at::Tensor& tensor) {
        TensorView view{};
        view.tensor = &tensor;
        view.defined = tensor.defined();
        if (view.defined) {
            view.sizes = tensor.sizes().data();
            view.strides = tensor.strides().data();
            view.dims = static_cast<int32_t>(tensor.dim());
            view.kind = static_cast<int8_t>(tensor.scalar_type());
        }
        if (is_global(tensor)) {
            const auto& meta = meta_of(tensor);
            any_global = true;
            view.spec = meta.spec;
            view.detached_view = meta.detached_view;
            locals.push_back(meta.local);
            if (tensor.requires_grad() && tensor.is_leaf()) flow::box_gradients(tensor);
        } else {
            locals.push_back(tensor);
        }
        tensors.push_back(view);
    }

    // The arguments, with these tensors and lists in place of the logical ones.
    Stack arguments_with(c10::ArrayRef<at::Tensor> with) const {
        Stack copy;
        for (size_t i = 0; i < count; ++i) {
            const auto& argument = arguments[i];
            const auto items = with.slice(argument.first, argument.tag == TENSORS ? argument.count : 0);
            if (argument.tag == TENSOR) {
                copy.emplace_back(with[argument.first]);
            } else if (argument.tag == TENSORS && values[i].isTensorList()) {
                copy.emplace_back(c10::List<at::Tensor>(items));
            } else if (argument.tag == TENSORS) {
                c10::List<std::optional<at::Tensor>> list;
                for (const auto& item : items) list.push_back(item.defined() ? std::optional(item) : std::nullopt);
                copy.emplace_back(std::move(list));
            } else if (argument.tag == INTS) {
                copy.emplace_back(c10::List<int64_t>(c10::IntArrayRef(argument.integers, argument.count)));
            } else {
                copy.push_back(values[i]);
            }
        }
        return copy;
    }

    void run() {
        if (info.is_view && arguments.size() > 1 && arguments[1].tag == INTS && op.schema().name() == "aten::view") {
            auto& local = locals[0];
            const c10::IntArrayRef sizes(arguments[1].integers, arguments[1].count);
            const auto known = at::infer_size_dv(sizes, local.numel());
            if (!at::detail::computeStride(local.sizes(), local.strides(), known)) local = local.contiguous();
        }
        Stack local = arguments_with(locals);
        op.callBoxed(&local);
        results.assign(std::make_move_iterator(local.begin()), std::make_move_iterator(local.end()));
    }
};

void kernel(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
    // Views are replayed in backward: as_strided would need the logical memory.
    c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
    const auto& info = cached_info_of(op);
    if (info.is_composite) {
        // These come here only without autograd (inference mode): take them apart.
        c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
        op.callBoxedForDispatchKey(DispatchKey::CompositeImplicitAutograd, *stack);
        return;
    }
    c10::impl::ExcludeDispatchKeyGuard below(BELOW);
    Call call(op, info, *stack);
    if (!call.any_global) {
        op.callBoxed(stack);
        return;
    }
    const CallView view{&call, op.schema().name().c_str(), op.schema().overload_name().c_str(), &op.schema(),
                        call.arguments.data(), call.tensors.data(), call.count, call.tensors.size(),
                        op.schema().returns().size(), info.is_view, info.reshapes, info.is_random, info.is_dynamic};
    flow::check(callbacks.dispatch(&view));
    TORCH_CHECK(call.outputs.size() == view.return_count, op.schema().name(), ": its rule gave ", call.outputs.size(), " results");
    torch::jit::drop(*stack, call.count);
    for (auto& output : call.outputs) stack->push_back(std::move(output));
}

// Whether nothing else uses the memory of a gradient's local.
bool local_is_exclusive(const at::Tensor& gradient) {
    flow::forget_base(gradient);
    const auto& local = meta_of(gradient).local;
    // The temporary pointer is a user of the meta as well.
    const bool is_only_handle =
        gradient.use_count() == 1 && gradient.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr().use_count() == 2 && local.use_count() == 1;
    return is_only_handle && local.has_storage() && local.storage().use_count() == 1;
}

// Whether this backward accumulates gradients in leaves, and does not return them (autograd.grad).
bool accumulates() {
    const auto* nodes = torch::autograd::get_current_graph_task_exec_info();
    return !nodes || nodes->empty();
}

}  // namespace

std::optional<at::Tensor> flow::boxed_gradient(const at::Tensor& leaf, const at::Tensor& gradient) {
    if (!is_global(leaf)) return std::nullopt;
    const bool exclusive = is_global(gradient) && local_is_exclusive(gradient);
    at::Tensor* boxed = nullptr;
    bool taken = false;
    flow::check(callbacks.gradient(&leaf, &gradient, accumulates(), exclusive, &boxed, &taken));
    if (taken) return at::Tensor();
    if (!boxed) return std::nullopt;
    const std::unique_ptr<at::Tensor> owner(boxed);
    return std::move(*owner);
}

extern "C" {

// Registers the kernel for all of libtorch's operators. Once in a process.
char* flow_global_register(Callbacks functions) {
    return guarded([&] {
        TORCH_CHECK(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= OLDEST_MINOR && TORCH_VERSION_MINOR <= NEWEST_MINOR,
                    "global tensors know libtorch 2.", OLDEST_MINOR, " to 2.", NEWEST_MINOR, ", and this is " TORCH_VERSION);
        callbacks = functions;
        static auto* library = new torch::Library(torch::Library::IMPL, "aten", KEY, __FILE__, __LINE__);
        auto& dispatcher = c10::Dispatcher::singleton();
        // libtorch warns that two kernels of functorch's are replaced: they serve a mode that no global
        // tensor is used in.
        Quiet quiet;
        c10::WarningUtils::WarningHandlerGuard guard(&quiet);
        for (const auto& name : dispatcher.getAllOpNames()) {
            if (name.name.rfind("aten::", 0) != 0 || !dispatcher.findSchema(name)) continue;
            const auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
            library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
        }
    });
}

// The spec of a global tensor, which lives as long as the tensor; null if it is plain.
const void* flow_global_spec(const at::Tensor* tensor) { return is_global(*tensor) ? meta_of(*tensor).spec : nullptr; }

// What this rank has of a global tensor: null outside its placement.
at::Tensor* flow_global_local(const at::Tensor* tensor) {
    if (!is_global(*tensor) || !meta_of(*tensor).local.defined()) return nullptr;
    return new at::Tensor(meta_of(*tensor).local);
}

// A global tensor of this local; null outside the placement: then of the kind and on the device of
// `like`. Takes the spec.
char* flow_global_wrap(const at::Tensor* local, const at::Tensor* like, const void* spec, const int64_t* sizes, size_t dims, bool shares,
                       at::Tensor** result) {
    return guarded([&] {
        *result = new at::Tensor(
            wrap(local ? local->detach() : at::Tensor(), spec, {{sizes, dims}, {}}, like->dtype(), like->device(), shares && local));
    });
}

// Runs the operation on this instead of the tensor's own local.
char* flow_call_set_local(Call* call, size_t index, const at::Tensor* local) {
    return guarded([&] { call->locals[index] = local ? *local : at::Tensor(); });
}

// What the operation runs on as this tensor.
at::Tensor* flow_call_local(const Call* call, size_t index) {
    return call->locals[index].defined() ? new at::Tensor(call->locals[index]) : nullptr;
}

// Runs the operation with this list.
char* flow_call_set_integers(Call* call, size_t argument, const int64_t* values, size_t count) {
    return guarded([&] {
        call->lists.emplace_back(values, values + count);
        call->arguments[argument].integers = call->lists.back().data();
        call->arguments[argument].count = static_cast<uint32_t>(count);
    });
}

char* flow_call_run(Call* call) {
    return guarded([&] { call->run(); });
}

// A result: visits its tensors, also an undefined one; or it is a number.
char* flow_call_result(const Call* call, size_t index, void* data, void (*visit)(void* data, const at::Tensor* tensor), bool* is_list,
                       ScalarView* scalar) {
    return guarded([&] {
        TORCH_CHECK(index < call->results.size(), call->op.schema().name(), " was not run on the locals");
        const auto& result = call->results[index];
        *is_list = result.isTensorList();
        *scalar = {NONE, 0, 0.0};
        if (result.isTensor()) visit(data, &result.toTensor());
        else if (result.isNone()) visit(data, &UNDEFINED);
        else if (*is_list) for (const at::Tensor& tensor : result.toTensorVector()) visit(data, &tensor);
        else if (result.isInt()) *scalar = {INT, result.toInt(), 0.0};
        else if (result.isDouble()) *scalar = {FLOAT, 0, result.toDouble()};
        else if (result.isBool()) *scalar = {BOOL, result.toBool(), 0.0};
        else TORCH_CHECK(false, call->op.schema().name(), " returns a ", result.tagKind(), ", which no global tensor can be");
    });
}

// The strides of the first tensor that a view operation makes of the logical tensors; none if
// libtorch cannot tell, as it says.
bool flow_call_view_strides(const Call* call, int64_t* strides, size_t capacity, size_t* count) {
    try {
        c10::SmallVector<at::Tensor, 8> stubs;
        for (const auto& view : call->tensors) {
            stubs.push_back(view.defined ? at::empty_strided(view.tensor->sizes(), view.tensor->strides(), view.tensor->options().device(c10::kMeta)) : UNDEFINED);
        }
        Stack stack = call->arguments_with(stubs);
        call->op.callBoxed(&stack);
        const auto& result = stack.front();
        const auto tensor = result.isTensorList() ? result.toTensorVector().at(0) : result.toTensor();
        if (static_cast<size_t>(tensor.dim()) > capacity) return false;
        std::copy(tensor.strides().begin(), tensor.strides().end(), strides);
        *count = tensor.dim();
        return true;
    } catch (...) {
        return false;
    }
}

// What becomes of a result: its spec, and the logical sizes of dimensions that are split. Null
// strides: contiguous.
struct OutputView {
    const void* spec;  // given away
    const int32_t* split_dims;
    const int64_t* split_sizes;
    size_t splits;
    const int64_t* strides;
    size_t stride_count;
    bool shares, detached_view;
};

}  // extern "C"

namespace {

at::Tensor wrap_result(const at::Tensor& local, const void* spec, const OutputView& output) {
    c10::SmallVector<int64_t, 6> sizes(local.sizes());
    for (size_t i = 0; i < output.splits; ++i) sizes[output.split_dims[i]] = output.split_sizes[i];
    auto tensor = wrap(local, spec, {sizes, {output.strides, output.stride_count}}, local.dtype(), local.device(), output.shares);
    meta_of(tensor).detached_view = output.detached_view;
    return tensor;
}

}  // namespace

extern "C" {

// Gives the caller result `index` as a global tensor; a number as it is. Of a list, `clone` makes
// specs for all but the first tensor.
char* flow_call_output(Call* call, size_t index, OutputView output, const void* (*clone)(const void* spec)) {
    return guarded([&] {
        const auto& result = call->results[index];
        if (result.isTensor() && result.toTensor().defined()) {
            call->outputs.emplace_back(wrap_result(result.toTensor(), output.spec, output));
        } else if (result.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor& local : result.toTensorVector()) list.push_back(wrap_result(local, clone(output.spec), output));
            callbacks.drop_spec(output.spec);
            call->outputs.emplace_back(std::move(list));
        } else {
            callbacks.drop_spec(output.spec);
            call->outputs.push_back(result);
        }
    });
}

// Gives the caller a tensor that Rust made.
char* flow_call_output_tensor(Call* call, const at::Tensor* tensor) {
    return guarded([&] { call->outputs.emplace_back(tensor ? *tensor : at::Tensor()); });
}

char* flow_call_output_tensors(Call* call, const at::Tensor* const* tensors, size_t count) {
    return guarded([&] {
        c10::List<at::Tensor> list;
        for (size_t i = 0; i < count; ++i) list.push_back(*tensors[i]);
        call->outputs.emplace_back(std::move(list));
    });
}

// Gives the caller the argument that the operation has written. If the operation has reshaped it,
// result `index` is its local now.
char* flow_call_output_written(Call* call, size_t index) {
    return guarded([&] {
        const int written = call->info.writes[index];
        TORCH_CHECK(written >= 0, "result ", index, " is no argument that was written");
        call->outputs.push_back(call->values[written]);
    });
}

// Makes a global tensor, in place, what another one is.
char* flow_global_assign(const at::Tensor* tensor, const at::Tensor* other) {
    return guarded([&] {
        TORCH_CHECK(is_global(*tensor) && is_global(*other), "both tensors must be global");
        auto* impl = tensor->unsafeGetTensorImpl();
        const auto* from = other->unsafeGetTensorImpl();
        impl->set_sizes_and_strides(from->sizes(), from->strides());
        if (from->has_storage()) {
            impl->set_storage_keep_dtype(from->storage());
            impl->set_storage_offset(from->storage_offset());
        }
        impl->set_backend_meta(from->get_backend_meta_intrusive_ptr());
    });
}

// A number of the tensor's own, which its shallow copies share; 0 of a plain tensor.
uint64_t flow_global_id(const at::Tensor* tensor) {
    static std::atomic<uint64_t> last{0};
    if (!is_global(*tensor)) return 0;
    auto& id = meta_of(*tensor).id;
    uint64_t none = 0;
    if (id.load() == 0) id.compare_exchange_strong(none, ++last);
    return id.load();
}

// Visits the tensors that the caller gets as result `index`, also an undefined one.
void flow_call_returned(const Call* call, size_t index, void* data, void (*visit)(void* data, const at::Tensor* tensor)) {
    if (index >= call->outputs.size()) return;
    const auto& output = call->outputs[index];
    if (output.isTensor()) visit(data, &output.toTensor());
    else if (output.isTensorList()) for (const at::Tensor& tensor : output.toTensorVector()) visit(data, &tensor);
}

// The number of the node that autograd runs on this thread; of the last one that it has made, if it
// runs none and `is_made`. False if there is neither.
bool flow_autograd_node(bool is_made, uint64_t* number, bool* is_backward) {
    const auto node = torch::autograd::get_current_node();
    *is_backward = node != nullptr;
    *number = node ? node->sequence_nr() : at::sequence_number::peek() - 1;
    return node || is_made;
}

// Whether autograd notes operations on this thread.
bool flow_grad_mode() { return at::GradMode::is_enabled(); }

// The argument that result `index` is, or -1.
int flow_call_writes(const Call* call, size_t index) { return call->info.writes[index]; }

char* flow_call_output_scalar(Call* call, ScalarView scalar) {
    return guarded([&] {
        if (scalar.tag == INT) call->outputs.emplace_back(scalar.integer);
        else if (scalar.tag == BOOL) call->outputs.emplace_back(scalar.integer != 0);
        else call->outputs.emplace_back(scalar.number);
    });
}

}  // extern "C"
