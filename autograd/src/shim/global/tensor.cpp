// A global tensor, and what Rust reads and changes of one.

#include "tensor.hpp"

#include <memory>

#include <torch/csrc/autograd/graph_task.h>

#include "../hooks.hpp"
#include "../shim.hpp"

using c10::DispatchKey;
using c10::DispatchKeySet;
using flow::guarded;
using namespace flow::global;

namespace {

DispatchKeySet autocast_key(c10::DeviceType device) {
    return DispatchKeySet(device == c10::kCUDA ? DispatchKey::AutocastCUDA : DispatchKey::AutocastCPU);
}

// The device's own key makes libtorch accept the tensor for `set_data` of a plain one. The key Meta
// makes composite operations and backward formulas choose their out-of-place branches.
DispatchKeySet keys_of(c10::Device device) {
    const auto own = device.type() == c10::kCUDA ? DispatchKey::CUDA : DispatchKey::CPU;
    return DispatchKeySet({own, DispatchKey::Meta, KEY}) | autocast_key(device.type());
}

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

void set_bits(c10::TensorImpl* impl, bool is_conj, bool is_neg) {
    impl->_set_conj(is_conj);
    impl->_set_neg(is_neg);
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

Callbacks flow::global::callbacks{};

at::Tensor flow::global::wrap(at::Tensor local, const void* spec, const Geometry& geometry, const Elements& elements, bool shares) {
    auto meta = c10::make_intrusive<GlobalMeta>(std::move(local), spec);
    auto impl = c10::make_intrusive<c10::TensorImpl>(keys_of(elements.device), elements.kind, elements.device);
    set_geometry(impl.get(), geometry, meta->local, shares);
    set_bits(impl.get(), elements.is_conj, elements.is_neg);
    impl->set_backend_meta(std::move(meta));
    return at::Tensor(std::move(impl));
}

at::Tensor flow::global::wrap_result(at::Tensor local, const OutputView& output) {
    c10::SmallVector<int64_t, 6> sizes(local.sizes());
    for (size_t i = 0; i < output.splits; ++i) {
        const auto dim = static_cast<size_t>(output.split_dims[i]);
        TORCH_CHECK(dim < sizes.size(), "a result of ", sizes.size(), " dimensions cannot be split along dimension ", dim);
        sizes[dim] = output.split_sizes[i];
    }
    const Elements elements(local);
    const Geometry geometry{sizes, {output.strides, output.stride_count}};
    auto tensor = wrap(std::move(local), callbacks.clone_spec(output.spec), geometry, elements, output.shares);
    meta_of(tensor).detached_view = output.detached_view;
    return tensor;
}

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

// The spec of a global tensor, which lives as long as the tensor; null if it is plain.
const void* flow_global_spec(const at::Tensor* tensor) { return is_global(*tensor) ? meta_of(*tensor).spec : nullptr; }

// What this rank has of a global tensor: null outside its placement.
at::Tensor* flow_global_local(const at::Tensor* tensor) {
    if (!is_global(*tensor) || !meta_of(*tensor).local.defined()) return nullptr;
    return new at::Tensor(meta_of(*tensor).local);
}

// A global tensor of this local; null outside the placement. Its kind, its device and its bits are
// those of `like`. Takes the spec.
char* flow_global_wrap(const at::Tensor* local, const at::Tensor* like, const void* spec, const int64_t* sizes, size_t dims, bool shares,
                       at::Tensor** result) {
    return guarded([&] {
        *result = new at::Tensor(wrap(local ? local->detach() : at::Tensor(), spec, {{sizes, dims}, {}}, Elements(*like), shares && local));
    });
}

// On a rank that has nothing of it: a result of these logical sizes, whose kind, device and bits are
// those of `like`.
char* flow_global_outside(const at::Tensor* like, const int64_t* sizes, size_t dims, OutputView output, at::Tensor** result) {
    return guarded([&] {
        const Geometry geometry{{sizes, dims}, {output.strides, output.stride_count}};
        auto tensor = wrap(at::Tensor(), callbacks.clone_spec(output.spec), geometry, Elements(*like), false);
        meta_of(tensor).detached_view = output.detached_view;
        *result = new at::Tensor(std::move(tensor));
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
        set_bits(impl, from->is_conj(), from->is_neg());
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

}  // extern "C"
