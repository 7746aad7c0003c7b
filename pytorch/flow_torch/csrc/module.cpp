// What Python sees of the C++ part.

#include <pybind11/chrono.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "backend.h"
#include "reducer.h"

namespace {

using namespace flow;

// This rank, and the place where the ranks meet.
struct Place {
    size_t rank, world_size, local_rank, local_world_size;
    int64_t node;
    std::string address, token;
};

c10::intrusive_ptr<FlowBackend> join(const std::optional<Place>& place, const std::string& name, Milliseconds timeout) {
    flow_group* group = nullptr;
    flow_membership membership{};
    if (place) {
        membership = {place->rank, place->world_size,      place->local_rank,    place->local_world_size,
                      place->node, place->address.c_str(), place->token.c_str()};
    }
    check(flow_join(place ? &membership : nullptr, name.c_str(), seconds(timeout), &group));
    return c10::make_intrusive<FlowBackend>(own(group), timeout);
}

bool is_shared(const FlowBackend& group, const Tensor& tensor) {
    return flow_is_shared(group.group().get(), tensor.const_data_ptr(), tensor.nbytes());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    const auto no_gil = py::call_guard<py::gil_scoped_release>();
    py::class_<Place>(module, "Place")
        .def(py::init<size_t, size_t, size_t, size_t, int64_t, std::string, std::string>(), py::arg("rank"), py::arg("world_size"),
             py::arg("local_rank"), py::arg("local_world_size"), py::arg("node"), py::arg("address"), py::arg("token"));
    py::class_<FlowBackend, c10::intrusive_ptr<FlowBackend>, c10d::Backend>(module, "Backend")
        .def("new_group_of", &FlowBackend::new_group_of, no_gil, py::arg("ranks"), py::arg("timeout"))
        .def("is_shared", &is_shared, py::arg("tensor"))
        .def("fail", &FlowBackend::fail, no_gil, py::arg("cause"))
        .def_property_readonly("options", &FlowBackend::getBackendOptions);
    py::class_<InPlaceReducer, std::shared_ptr<InPlaceReducer>>(module, "InPlaceReducer")
        .def(py::init([](const c10::intrusive_ptr<FlowBackend>& backend, std::shared_ptr<c10d::Reducer> torch,
                         std::vector<std::string> names) {
                 const auto new_group = [backend] { return backend->duplicate(); };
                 return std::make_shared<InPlaceReducer>(backend->group(), new_group, std::move(torch), std::move(names));
             }),
             py::arg("backend"), py::arg("torch"), py::arg("names"))
        .def("follow_hook", &InPlaceReducer::follow_hook, no_gil, py::arg("sent_as"))
        .def("leave", &InPlaceReducer::leave, no_gil)
        .def("connect", &InPlaceReducer::connect, no_gil)
        .def("expect", &InPlaceReducer::expect, no_gil, py::arg("is_uneven"), py::arg("counts_ranks"))
        .def("shadow", &InPlaceReducer::shadow, no_gil, py::arg("counts_ranks"))
        .def("check_finished", &InPlaceReducer::check_finished, no_gil)
        .def("fail", &InPlaceReducer::fail, no_gil, py::arg("cause"))
        .def("in_place_bytes", &InPlaceReducer::in_place_bytes, no_gil)
        .def("stats", &InPlaceReducer::stats, no_gil);
    py::class_<Stats>(module, "Stats")
        .def_readonly("backwards", &Stats::backwards)
        .def_readonly("buckets", &Stats::buckets)
        .def_readonly("backward", &Stats::backward)
        .def_readonly("exposed", &Stats::exposed);
    py::class_<BucketStats>(module, "BucketStats")
        .def_readonly("bytes", &BucketStats::bytes)
        .def_property_readonly("parameters", [](const BucketStats& own) { return *own.parameters; })
        .def_readonly("in_place", &BucketStats::in_place)
        .def_readonly("ready_at", &BucketStats::ready_at);
    flow_set_interrupt_check(is_interrupted);
    module.def("end_all", &Lane::end_all, no_gil);
    module.def("complete_deferred", &Lane::complete_all_deferred, no_gil);
    module.def("wait_for", [](const torch::jit::PythonFutureWrapper& future) { Lane::wait_for(future.fut); }, no_gil, py::arg("future"));
    module.def("join", &join, no_gil, py::arg("place"), py::arg("name"), py::arg("timeout"));
}
