// Backwards of several tensors at once, as a whole or in two halves.

#include "shim.hpp"

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace autograd = torch::autograd;
using autograd::edge_list;
using autograd::variable_list;
using flow::TensorSlice;
using flow::guarded;

namespace {

// Where a backward begins. The tensors themselves are not kept.
struct Graph {
    edge_list roots;
    // Once the first half is done: a gradient for each root.
    variable_list gradients;
};

variable_list tensors(TensorSlice slice) {
    variable_list list;
    for (size_t i = 0; i < slice.count; ++i) list.push_back(slice.tensors[i] ? *slice.tensors[i] : at::Tensor());
    return list;
}

// Leaves out the roots without a gradient, and those that need none.
void forget_undefined(Graph& graph) {
    edge_list roots;
    variable_list gradients;
    for (size_t i = 0; i < graph.roots.size(); ++i) {
        if (!graph.roots[i].is_valid() || !graph.gradients[i].defined()) continue;
        roots.push_back(graph.roots[i]);
        gradients.push_back(graph.gradients[i]);
    }
    graph = {std::move(roots), std::move(gradients)};
}

void take_gradients(Graph& graph, TensorSlice gradients) {
    TORCH_CHECK(gradients.count == graph.roots.size(), "there are ", gradients.count, " gradients for ", graph.roots.size(), " tensors; give one for each");
    graph.gradients = tensors(gradients);
    forget_undefined(graph);
}

// Runs all of the graph, accumulates in the leaves, and forgets it.
void run(Graph& graph) {
    const auto [roots, gradients] = std::exchange(graph, {});
    if (!roots.empty()) autograd::Engine::get_default_engine().execute(roots, gradients, false, false, true);
}

// For each node that a backward from the roots passes: whether it leads to one of these inputs.
std::unordered_map<autograd::Node*, bool> leading_to(const edge_list& inputs, const edge_list& roots) {
    std::unordered_map<autograd::Node*, bool> leads;
    for (const auto& input : inputs) {
        if (input.is_valid()) leads[input.function.get()] = true;
    }
    // Nodes whose edges are looked at: the node, and the number of the next edge.
    std::vector<std::pair<autograd::Node*, size_t>> path;
    const auto enter = [&](autograd::Node* node) {
        if (leads.emplace(node, false).second) path.emplace_back(node, 0);
    };
    for (const auto& root : roots) {
        enter(root.function.get());
        while (!path.empty()) {
            auto* const node = path.back().first;
            const auto next = path.back().second++;
            const auto& edges = std::as_const(*node).next_edges();
            if (next < edges.size()) {
                if (edges[next].is_valid()) enter(edges[next].function.get());
                continue;
            }
            for (const auto& edge : edges) {
                if (edge.is_valid() && leads.at(edge.function.get())) leads[node] = true;
            }
            path.pop_back();
        }
    }
    return leads;
}

}  // namespace

extern "C" {

char* flow_graph_new(TensorSlice outputs, Graph** result) {
    return guarded([&] {
        auto graph = std::make_unique<Graph>();
        for (const auto& output : tensors(outputs)) graph->roots.push_back(autograd::impl::gradient_edge(output));
        *result = graph.release();
    });
}

void flow_graph_drop(Graph* graph) {
    delete graph;
}

// Accumulates gradients in all leaves. A null gradient stands for none.
char* flow_graph_backward(Graph* graph, TensorSlice gradients) {
    return guarded([&] {
        take_gradients(*graph, gradients);
        run(*graph);
    });
}

// Appends the gradients of the inputs, leaves, to `results` by `push`, which gets null for an input
// without one, and accumulates none.
//
// What remains of the graph leads to the other leaves: it begins where this first half has passed by
// their branches, with the gradients that came there. The edges on the way to the inputs are cut, so
// that the second half does not take that way again, and what lies on it is freed.
char* flow_graph_backward_inputs(Graph* graph, TensorSlice gradients, TensorSlice inputs, void* results, void (*push)(void* results, at::Tensor* tensor)) {
    return guarded([&] {
        take_gradients(*graph, gradients);
        edge_list captured;
        for (const auto& input : tensors(inputs)) captured.push_back(autograd::impl::gradient_edge(input));
        for (const auto& input : captured) TORCH_CHECK(input.is_valid(), "an input requires no gradient");
        const auto leads = leading_to(captured, graph->roots);

        Graph rest;
        edge_list through;
        for (size_t i = 0; i < graph->roots.size(); ++i) {
            const auto& root = graph->roots[i];
            if (leads.at(root.function.get())) {
                through.push_back(root);
                continue;
            }
            rest.roots.push_back(root);
            rest.gradients.push_back(graph->gradients[i]);
        }
        // Nodes on the way to the inputs that have branches to other leaves.
        std::unordered_map<autograd::Node*, autograd::Edge> owners;
        const auto visit = [&](const autograd::Edge& edge) { owners.try_emplace(edge.function.get(), edge); };
        for (const auto& root : through) visit(root);
        for (const auto& [node, is_leading] : leads) {
            if (!is_leading) continue;
            for (const auto& edge : std::as_const(*node).next_edges()) {
                if (edge.is_valid() && leads.at(edge.function.get())) visit(edge);
            }
        }
        std::vector<autograd::Node*> junctions;
        for (const auto& [node, edge] : owners) {
            const auto& edges = std::as_const(*node).next_edges();
            const auto is_branch = [&](const autograd::Edge& next) { return next.is_valid() && !leads.at(next.function.get()); };
            if (!std::any_of(edges.begin(), edges.end(), is_branch)) continue;
            junctions.push_back(node);
            for (uint32_t input = 0; input < node->num_inputs(); ++input) captured.emplace_back(edge.function, input);
        }

        variable_list values(captured.size());
        if (!through.empty() && inputs.count > 0) {
            variable_list given;
            for (size_t i = 0; i < graph->roots.size(); ++i) {
                if (leads.at(graph->roots[i].function.get())) given.push_back(graph->gradients[i]);
            }
            values = autograd::Engine::get_default_engine().execute(through, given, true, false, false, captured);
        }
        for (auto* node : junctions) {
            for (auto& edge : node->next_edges()) {
                if (edge.is_valid() && leads.at(edge.function.get())) edge = autograd::Edge();
            }
        }
        for (size_t i = inputs.count; i < captured.size(); ++i) {
            rest.roots.push_back(captured[i]);
            rest.gradients.push_back(values[i]);
        }
        forget_undefined(rest);
        *graph = std::move(rest);
        for (size_t i = 0; i < inputs.count; ++i) push(results, values[i].defined() ? new at::Tensor(values[i]) : nullptr);
    });
}

// The second half: accumulates gradients in the leaves that are left.
char* flow_graph_backward_weights(Graph* graph) {
    return guarded([&] { run(*graph); });
}

}  // extern "C"
