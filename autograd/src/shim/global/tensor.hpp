// Global tensors: ordinary tensors with the logical sizes, whose elements lie on many ranks.
//
// A global tensor is a stock TensorImpl with one dispatch key more, below autograd. Its BackendMeta,
// which every shallow copy shares, holds this rank's local tensor and the spec, a value of Rust's.
// Every operation on such a tensor comes to `kernel` in call.cpp, which hands it to Rust. Autograd
// sees logical tensors only, and its formulas are again operations on global tensors.

#pragma once

#include <atomic>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

namespace flow::global {

struct CallView;
struct FastCallView;

// Rust's part.
struct Callbacks {
    // An operation that was dispatched before: false if it is to be dispatched again.
    char* (*fast)(const FastCallView* call, bool* done);
    char* (*dispatch)(const CallView* call);
    // Null if the gradient may stay as it is. `taken`, if it may be: nothing is to be accumulated.
    // `exclusive`: nothing else uses the gradient's memory.
    char* (*gradient)(const at::Tensor* leaf, const at::Tensor* gradient, bool may_take, bool exclusive, at::Tensor** boxed, bool* taken);
    uint64_t (*spec_id)(const void* spec);
    const void* (*clone_spec)(const void* spec);
    void (*drop_spec)(const void* spec);
};
extern Callbacks callbacks;

// A key of a functorch mode that no tensor of libtorch's carries, in 2.11 and 2.13.
constexpr auto KEY = c10::DispatchKey::FuncTorchDynamicLayerBackMode;

struct GlobalMeta final : c10::BackendMeta {
    GlobalMeta(at::Tensor local, const void* spec) : local(std::move(local)), spec(spec), spec_id(callbacks.spec_id(spec)) {}
    GlobalMeta(const GlobalMeta&) = delete;
    GlobalMeta& operator=(const GlobalMeta&) = delete;
    ~GlobalMeta() override { callbacks.drop_spec(spec); }

    at::Tensor local;  // never another one; undefined on ranks outside the placement
    const void* const spec;
    const uint64_t spec_id;
    // A view of another tensor that had to be boxed: it does not share that tensor's memory.
    bool detached_view = false;
    // A number of the tensor's own, once somebody has asked for it.
    std::atomic<uint64_t> id{0};
};

inline bool is_global(const at::TensorBase& tensor) {
    return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(KEY);
}

inline GlobalMeta& meta_of(const at::TensorBase& tensor) {
    return *static_cast<GlobalMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

// A tensor's sizes and where its elements are, as far as global tensors have that.
struct Geometry {
    c10::IntArrayRef sizes;
    c10::IntArrayRef strides;  // empty: contiguous
};

// What becomes of a result: its spec, and the logical sizes of dimensions that are split. Null
// strides: contiguous.
struct OutputView {
    const void* spec;
    const int32_t* split_dims;
    const int64_t* split_sizes;
    size_t splits;
    const int64_t* strides;
    size_t stride_count;
    bool shares, detached_view;
};

inline const at::Tensor UNDEFINED;

// A local result as a global tensor.
at::Tensor wrap_result(at::Tensor local, const OutputView& output);

// What a tensor's elements are, and whether they are read as conjugated or negated: bits that a
// global tensor and its local have alike, so that libtorch resolves both.
struct Elements {
    caffe2::TypeMeta kind;
    c10::Device device;
    bool is_conj, is_neg;

    explicit Elements(const at::Tensor& like) : kind(like.dtype()), device(like.device()), is_conj(like.is_conj()), is_neg(like.is_neg()) {}
};

// A global tensor of this local, outside autograd. Takes the spec.
at::Tensor wrap(at::Tensor local, const void* spec, const Geometry& geometry, const Elements& elements, bool shares);

}  // namespace flow::global
