// What Python sees of the C++ part: operators and a class of the namespace "flow", which extension.py calls.

#include "manylinux.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/custom_class.h>
#include <torch/library.h>

#include "backend.h"
#include "cast.h"
#include "reducer.h"

namespace {

using namespace flow;
using ReducerPtr = c10::intrusive_ptr<InPlaceReducer>;
using BackendPtr = c10::intrusive_ptr<FlowBackend>;

Milliseconds milliseconds(double seconds) {
    return std::chrono::ceil<Milliseconds>(std::chrono::duration<double>(seconds));
}

// Backends go to Python in a process group of their own.
GroupPtr boxed(const BackendPtr& backend) {
    auto group = c10::make_intrusive<c10d::ProcessGroup>(backend->getRank(), backend->getSize());
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
    return group;
}

// The group's backend for CPUs, if that is flow's.
BackendPtr find_backend(const GroupPtr& group) {
    const auto types = group->getDeviceTypes();
    if (std::find(types.begin(), types.end(), c10::DeviceType::CPU) == types.end()) return nullptr;
    return c10::dynamic_intrusive_pointer_cast<FlowBackend>(group->getBackend(c10::DeviceType::CPU));
}

BackendPtr backend_of(const GroupPtr& group) {
    auto found = find_backend(group);
    TORCH_CHECK_VALUE(found, "flow: this process group has no backend of flow's for CPUs");
    return found;
}

bool is_flow(const GroupPtr& group) { return find_backend(group) != nullptr; }

// `place`: rank, world size, local rank, local world size and node; none: the environment has them.
GroupPtr join(const std::optional<std::vector<int64_t>>& place, const std::string& address, const std::string& token,
              const std::string& name, double timeout) {
    flow_group* group = nullptr;
    flow_membership membership{};
    if (place) {
        const auto at = [&](size_t index) { return static_cast<size_t>(place->at(index)); };
        membership = {at(0), at(1), at(2), at(3), place->at(4), address.c_str(), token.c_str()};
    }
    check(flow_join(place ? &membership : nullptr, name.c_str(), timeout, &group));
    return boxed(c10::make_intrusive<FlowBackend>(own(group), milliseconds(timeout)));
}

GroupPtr new_group_of(const GroupPtr& group, const std::vector<int64_t>& ranks, double timeout) {
    return boxed(backend_of(group)->new_group_of({ranks.begin(), ranks.end()}, milliseconds(timeout)));
}

// `place` has the store.
void keep_store(const GroupPtr& group, const GroupPtr& place) { backend_of(group)->keep_store(place->getStore()); }

// A group that has no ranks yet. `place` has the store.
GroupPtr reconfigurable(const GroupPtr& place, const std::string& handle, double timeout) {
    return boxed(c10::make_intrusive<FlowBackend>(place->getStore(), handle, place->getRank(), place->getSize(), milliseconds(timeout)));
}

// The job's group: see flow_reconfigure. `before`: none at the start of this process.
GroupPtr reconfigure(const std::optional<GroupPtr>& before, double timeout) {
    if (!before) return join(std::nullopt, "", "", "", timeout);
    const auto group = backend_of(*before)->next_of_job(milliseconds(timeout));
    check(flow_set_timeout(group.get(), timeout));
    return boxed(c10::make_intrusive<FlowBackend>(group, milliseconds(timeout)));
}

int64_t newcomers(const GroupPtr& group) {
    size_t count = 0;
    check(flow_newcomers(backend_of(group)->group().get(), &count));
    return static_cast<int64_t>(count);
}

bool is_shared(const GroupPtr& group, const Tensor& tensor) {
    return flow_is_shared(backend_of(group)->group().get(), tensor.const_data_ptr(), tensor.nbytes());
}

void fail(const GroupPtr& group, const std::string& cause) {
    backend_of(group)->fail(cause);
}

bool all_reduce_at_once(const Tensor& tensor, const std::string& group) {
    const auto backend = find_backend(c10d::resolve_process_group(group));
    return backend && backend->all_reduce_at_once(tensor, c10d::ReduceOp::SUM);
}

// A group of any backend.
void all_reduce(const Tensor& tensor, const std::string& name, std::string_view op) {
    const auto group = c10d::resolve_process_group(name);
    const auto backend = find_backend(group);
    const auto reduction = reduction_of(op);
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    if (backend && backend->all_reduce_at_once(tensor, reduction)) return;
    Tensors tensors{tensor.is_complex() ? at::view_as_real(tensor) : tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = reduction;
    options.asyncOp = false;
    const auto work = group->allreduce(tensors, options);
    if (work) work->wait();
}

void wait_for(const c10::OperatorHandle&, torch::jit::Stack* stack) {
    Lane::wait_for(torch::jit::pop(*stack).toFuture());
}

// `torch` is the address of torch's Reducer, in this object of Python's.
ReducerPtr in_place_reducer(const GroupPtr& group, int64_t object, int64_t torch, std::vector<std::string> names) {
    const auto backend = backend_of(group);
    const auto new_group = [backend] { return backend->duplicate(); };
    auto reducer = keep<c10d::Reducer>(reinterpret_cast<void*>(object), torch);
    return c10::make_intrusive<InPlaceReducer>(backend->group(), new_group, std::move(reducer), std::move(names));
}

InPlaceReducer& reducer_at(int64_t address) {
    return *reinterpret_cast<InPlaceReducer*>(address);
}

void sum_in(const ReducerPtr& reducer, const std::optional<GroupPtr>& group) {
    if (!group) return reducer->sum_in(nullptr);
    reducer->sum_in([backend = backend_of(*group)] { return backend->duplicate(); });
}

// The reducer's parameters as this type.
std::vector<Tensor> casts(const ReducerPtr& reducer, at::ScalarType type) {
    std::vector<Tensor> made;
    for (const auto& param : reducer->params()) made.push_back(Cast::apply(param, type, reducer, made.size()));
    return made;
}

using BucketTuple = std::tuple<int64_t, std::vector<std::string>, int64_t, double, double, double>;

// In the order of bindings.Stats and bindings.BucketStats.
std::tuple<int64_t, std::vector<BucketTuple>, double, double> stats(const ReducerPtr& reducer) {
    const auto own = reducer->stats();
    std::vector<BucketTuple> buckets;
    for (const auto& bucket : own.buckets) {
        buckets.emplace_back(bucket.bytes, *bucket.parameters, bucket.in_place, bucket.ready_at, bucket.ready_to_done,
                             bucket.behind_backward);
    }
    return {own.backwards, std::move(buckets), own.backward, own.exposed};
}

}  // namespace

// Another library may have this namespace, too.
TORCH_LIBRARY_FRAGMENT(flow, library) {
    library.class_<InPlaceReducer>("InPlaceReducer")
        .def(torch::init(&in_place_reducer))
        .def("follow_hook", &InPlaceReducer::follow_hook)
        .def("reduce_as", &InPlaceReducer::reduce_as)
        .def("casts", &casts)
        .def("sum_in", &sum_in)
        .def("tell_hook", &InPlaceReducer::tell_hook)
        .def("leave", &InPlaceReducer::leave)
        .def("connect", &InPlaceReducer::connect)
        .def("shadow", &InPlaceReducer::shadow)
        .def("fail", [](const ReducerPtr& own, const std::string& cause) { own->fail(cause); })
        .def("address", [](const ReducerPtr& own) { return reinterpret_cast<int64_t>(own.get()); })
        .def("in_place_bytes", &InPlaceReducer::in_place_bytes)
        .def("stats", &stats);
    // What each forward calls takes an address, and less time than methods, or operators on objects.
    library.def("check_finished", [](int64_t address) { reducer_at(address).check_finished(); });
    library.def("expect", [](int64_t address, bool is_uneven, bool counts_ranks) { reducer_at(address).expect(is_uneven, counts_ranks); });
    // For torch.compile, too, and its tensors without memory.
    library.def("all_reduce_(Tensor(a!) tensor, str group, str op=\"sum\") -> ()");
    library.impl("all_reduce_", c10::DispatchKey::CompositeExplicitAutograd, &all_reduce);
    library.impl("all_reduce_", c10::DispatchKey::Meta, [](const Tensor&, const std::string&, std::string_view) {});
    library.def("all_reduce_at_once(Tensor tensor, str group) -> bool");
    library.impl("all_reduce_at_once", c10::DispatchKey::CompositeImplicitAutograd, &all_reduce_at_once);
    library.def("join", &join);
    library.def("is_flow", &is_flow);
    library.def("new_group_of", &new_group_of);
    library.def("keep_store", &keep_store);
    library.def("reconfigurable", &reconfigurable);
    library.def("reconfigure", &reconfigure);
    library.def("newcomers", &newcomers);
    library.def("operations", [] { return Seen::operations.load(); });
    library.def("are_all_idle", [] { return Lane::are_all_idle(); });
    library.def("losses", [] { return Seen::losses.load(); });
    library.def("is_shared", &is_shared);
    library.def("fail", &fail);
    library.def("end_all", &Lane::end_all);
    library.def("complete_deferred", &Lane::complete_all_deferred);
    library.def("wait_for(Future(Any) future) -> ()", torch::CppFunction::makeFromBoxedFunction<&wait_for>());
    // For `_pybind11_conduit_v1_`, by which a Reducer of Python's is found.
    library.def("reducer_type", [] { return reinterpret_cast<int64_t>(&typeid(c10d::Reducer)); });
    library.def("rethrow_interrupt", &rethrow_interrupt);
    library.def("use_interrupt_check", [] { flow_set_interrupt_check(is_interrupted); });
}
