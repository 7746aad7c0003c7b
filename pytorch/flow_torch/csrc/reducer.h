// Gradients that are reduced where they are, while backward runs.
#pragma once

#include <functional>
#include <set>

#include <ATen/ScalarOps.h>
#include <ATen/TensorUtils.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/csrc/distributed/autograd/context/container.h>

#include "gradient_memory.h"
#include "tensors.h"
#include "torch_reducer.h"

namespace flow {

// Does what the Reducer of torch's DistributedDataParallel does in a backward, but copies no large gradient: backward computes
// them in shared memory, and all ranks reduce them there. Which gradients are expected, and how they are divided into buckets, is
// decided by torch's Reducer, beside which this stands, and which can do any single backward instead.
//
// Small gradients, and those that lie elsewhere, have another layout or share their memory, are copied to a place of their own and
// back.
//
// A backward that fails makes this unusable, on all ranks; the process group stays usable.
class InPlaceReducer final : public std::enable_shared_from_this<InPlaceReducer> {
public:
    // `new_group` makes a group of the same ranks, when all call it. `names` are the parameters'.
    InPlaceReducer(Group group, std::function<Group()> new_group, std::shared_ptr<c10d::Reducer> torch, std::vector<std::string> names)
        : memory_(std::move(group)), new_group_(std::move(new_group)), torch_(std::move(torch)), names_(std::move(names)) {
        const auto& params = TorchReducer::params(*torch_);
        TORCH_INTERNAL_ASSERT(names_.size() == params.size());
        for (const auto& param : params) {
            const bool is_large = param.nbytes() >= kMinShared;
            gradients_.push_back({param, layout_of(param), is_large});
            if (is_large) lengths_.insert(param.nbytes());
        }
        for (size_t index = 0; index < params.size(); ++index) {
            const auto& node = TorchReducer::grad_accumulators(*torch_)[index];
            hooks_.emplace_back(node, node->add_post_hook(std::make_unique<Hook>(this, index)));
        }
        if (auto* const allocator = GradientAllocator::get()) {
            for (const auto length : lengths_) allocator->add(length, memory_);
        }
    }

    ~InPlaceReducer() {
        for (const auto& [node, hook] : hooks_) node->del_post_hook(hook);
        if (auto* const allocator = GradientAllocator::get()) {
            for (const auto length : lengths_) allocator->remove(length, memory_);
        }
    }

    // Makes the group that reductions go in. All ranks call this, or none: then their first backward makes it.
    void connect() {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        if (!own_) own_ = new_group_();
    }

    // After torch's Reducer has been prepared for a backward: takes that over. Left to it are the first backward of a static graph,
    // in which it learns what the graph is, and one whose gradients go to a context of distributed autograd.
    void expect() {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        {
            std::lock_guard<std::mutex> torch_lock(TorchReducer::mutex(*torch_));
            const auto calls = TorchReducer::backward_calls(*torch_);
            const bool is_first = calls == 0 || (calls == 1 && TorchReducer::hook_called(*torch_));
            const bool has_context = torch::distributed::autograd::DistAutogradContainer::currentContextId() != -1;
            expects_ = !has_context && (!TorchReducer::is_static(*torch_) || !is_first);
            if (!expects_) return;
            TorchReducer::expects_hooks(*torch_) = false;
        }
        if (buckets_.empty() || TorchReducer::has_rebuilt_bucket(*torch_) != has_rebuilt_bucket_) make_buckets();
        for (auto& bucket : buckets_) bucket.missing = bucket.members.size();
        for (size_t index = 0; index < gradients_.size(); ++index) {
            auto& gradient = gradients_[index];
            // A change of type loses hooks.
            TORCH_CHECK(torch::autograd::impl::try_get_grad_accumulator(gradient.param) == hooks_[index].first, here(), "the type of ",
                        names_[index], " has changed since its module was wrapped: wrap it again");
            gradient.is_ready = false;
            gradient.hooks = hooks_expected(index);
        }
        marked_unused_ = false;
        ready_ = next_ = in_place_ = 0;
        task_ = -1;
    }

    // Leaves the next backward to torch's Reducer, also if there has been a forward for another, which did not come.
    void leave() {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        expects_ = false;
    }

    // An error if the last backward has failed, or has not brought all gradients.
    void check_finished() {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        if (failure_.empty() && !is_under_way_) return;
        if (!failure_.empty()) {
            C10_THROW_ERROR(DistBackendError, c10::str(here(), "an earlier backward failed: wrap the model again. It was: ", failure_));
        }
        std::vector<std::string> missing;
        for (size_t index = 0; index < gradients_.size(); ++index) {
            if (!gradients_[index].is_ready && missing.size() < 20) missing.push_back(names_[index]);
        }
        const auto cause =
            c10::str("Expected to have finished reduction in the prior iteration before starting a new one. ", here(),
                     gradients_.size() - ready_, " of ", gradients_.size(), " parameters got no gradient in it: ", c10::Join(", ", missing),
                     gradients_.size() - ready_ > missing.size() ? ", ..." : "", ". ", advice_for_missing());
        fail(cause);
        TORCH_CHECK(false, cause);
    }

    // Makes this unusable, on all ranks.
    void fail(const std::string& cause) {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        if (!failure_.empty()) return;
        failure_ = cause;
        expects_ = false;
        if (own_) flow_abort(own_.get(), cause.c_str());
        release();
    }

    // Returns how many bytes of the last backward's gradients were reduced where they were.
    size_t in_place_bytes() {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        return in_place_;
    }

private:
    // A pointer to a node, of another type in each version of PyTorch.
    using NodePtr = std::decay_t<decltype(TorchReducer::grad_accumulators(std::declval<c10d::Reducer&>())[0])>;

    struct Gradient {
        at::Tensor param;
        // The strides that it has on all ranks: they reduce what lies at the same place in memory.
        std::vector<int64_t> layout;
        // It is a piece of its bucket. Small ones are one piece together.
        bool is_large;
        size_t bucket = 0;
        size_t piece = 0;
        // Shared memory for it; of large ones only where it was needed.
        at::Tensor place;
        // The tensor that is reduced in this backward: the gradient itself, or its place.
        at::Tensor reduced;
        // The number of hooks that are still to come before it is ready.
        int hooks = 1;
        bool is_ready = false;
    };

    // Gradients of one type that are reduced together.
    struct Bucket {
        std::vector<size_t> members;
        at::ScalarType type;
        flow_dtype code;
        // Whether gradients are divided before they are summed up; else the mean is computed at once.
        bool divides_first;
        // The places of small gradients, the first of the pieces; undefined if there are none.
        at::Tensor small;
        std::vector<flow_buffer> pieces;
        // The number of gradients that are not ready.
        size_t missing = 0;
    };

    struct Hook final : torch::autograd::FunctionPostHook {
        Hook(InPlaceReducer* reducer, size_t index) : reducer(reducer), index(index) {}

        torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                                  const torch::autograd::variable_list& inputs) override {
            reducer->on_gradient(index, inputs.empty() ? at::Tensor() : inputs[0]);
            return outputs;
        }

        InPlaceReducer* const reducer;
        const size_t index;
    };

    // Goes with a backward, and notices if that does not reach its end.
    struct Watch {
        explicit Watch(const std::shared_ptr<InPlaceReducer>& reducer) : reducer(reducer) {}
        Watch(const Watch&) = delete;
        Watch& operator=(const Watch&) = delete;
        ~Watch() {
            const auto own = reducer.lock();
            if (own && !is_over) own->on_failed_backward();
        }

        const std::weak_ptr<InPlaceReducer> reducer;
        bool is_over = false;
    };

    std::string here() const { return c10::str("rank ", flow_rank(memory_.get()), ": "); }

    bool is_dynamic() const { return TorchReducer::finds_unused(*torch_) && !TorchReducer::is_static(*torch_); }

    // Advice for parameters that got no gradient.
    const char* advice_for_missing() const {
        if (TorchReducer::is_static(*torch_)) {
            return "With static_graph=True each backward brings gradients to the parameters that the first one brought some to: where others "
                   "take part in the loss, find_unused_parameters=True in its place helps.";
        }
        if (TorchReducer::finds_unused(*torch_)) {
            return "find_unused_parameters=True finds the tensors that forward returns by themselves, and in lists, tuples, dictionaries and "
                   "dataclasses: it does not find them in other objects.";
        }
        return "find_unused_parameters=True is for parameters that do not take part in every loss.";
    }

    int hooks_expected(size_t index) const {
        if (!TorchReducer::is_static(*torch_)) return 1;
        return TorchReducer::hooks_of_graph(*torch_).at(index);
    }

    // Divides the parameters into buckets as torch's Reducer does.
    void make_buckets() {
        at::NoGradGuard no_grad;
        has_rebuilt_bucket_ = TorchReducer::has_rebuilt_bucket(*torch_);
        buckets_.clear();
        for (const auto& theirs : TorchReducer::buckets(*torch_)) {
            const auto type = theirs.variables.at(0).scalar_type();
            const auto ranks = flow_world_size(memory_.get());
            // A power of two can as well divide the sum: the bits are the same, but of numbers at the end of f16's small range.
            const bool divides_first = (ranks & (ranks - 1)) != 0 || type == at::kHalf;
            Bucket bucket{theirs.variable_indices, type, code_of(type).value(), divides_first, {}, {}};
            int64_t small = 0;
            for (const auto index : bucket.members) {
                if (!gradients_[index].is_large) small += gradients_[index].param.numel();
            }
            if (small > 0) {
                bucket.small = shared({small}, type);
                bucket.pieces.push_back(elements(bucket.small, bucket.code));
            }
            int64_t start = 0;
            for (const auto index : bucket.members) {
                auto& gradient = gradients_[index];
                gradient.bucket = buckets_.size();
                if (gradient.is_large) {
                    gradient.piece = bucket.pieces.size();
                    bucket.pieces.emplace_back();
                } else {
                    const auto& memory = bucket.small.defined() ? bucket.small : at::empty({0}, type);
                    gradient.place = memory.as_strided(gradient.param.sizes(), gradient.layout, start);
                    start += gradient.param.numel();
                }
            }
            buckets_.push_back(std::move(bucket));
        }
    }

    at::Tensor shared(at::IntArrayRef sizes, at::ScalarType type) const {
        auto tensor = empty_shared(memory_.get(), sizes, type);
        TORCH_CHECK(tensor.defined(), "flow: no shared memory for gradients: ", flow_error_message());
        return tensor;
    }

    // The strides that PyTorch gives gradients of the parameter, as a rule: its own, if it lies without gaps.
    static std::vector<int64_t> layout_of(const at::Tensor& param) {
        return param.is_non_overlapping_and_dense() ? param.strides().vec() : at::detail::defaultStrides(param.sizes());
    }

    static bool has_layout(const at::Tensor& tensor, at::IntArrayRef strides) {
        for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
            if (tensor.size(axis) != 1 && tensor.stride(axis) != strides[axis]) return false;
        }
        return true;
    }

    static void copy(const at::Tensor& to, const at::Tensor& from) {
        if (has_layout(to, from.strides()) && to.is_neg() == from.is_neg()) {
            std::memcpy(to.data_ptr(), from.const_data_ptr(), from.nbytes());
        } else {
            to.copy_(from);
        }
    }

    // Whether nothing else uses the memory of a gradient that has just been accumulated. `incoming` is what came.
    static bool is_exclusive(const at::Tensor& gradient, const at::Tensor& incoming) {
        const auto& storage = gradient.storage();
        const bool was_taken = incoming.defined() && incoming.has_storage() && incoming.storage().is_alias_of(storage);
        if (!was_taken) return storage.use_count() == 1;
        // Only the engine has it, or it would not have been taken. What it is a view of goes with it, and would look like another user.
        if (incoming.is_view() && !incoming.requires_grad()) {
            incoming.unsafeGetTensorImpl()->set_autograd_meta(nullptr);
        }
        return storage.use_count() == 2;
    }

    // Whether nobody changes the gradient after this hook: no hook that was added to the parameter later, and no other module that
    // reduces it as well.
    bool is_last(const Gradient& gradient) const {
        const auto is_own = [](const auto& hook) { return dynamic_cast<const Hook*>(hook.get()) != nullptr; };
        const auto& all = hooks_[&gradient - gradients_.data()].first->post_hooks();
        return is_own(all.back()) && std::count_if(all.begin(), all.end(), is_own) == 1;
    }

    void on_gradient(size_t index, const at::Tensor& incoming) {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        if (!expects_) return;
        failing([&] {
            is_under_way_ = true;
            watch_backward();
            connect();
            const bool is_static = TorchReducer::is_static(*torch_);
            if (!std::exchange(marked_unused_, true)) {
                for (const auto unused : TorchReducer::unused(*torch_)) mark_ready(unused, nullptr);
            }
            auto& hooks = gradients_[index].hooks;
            TORCH_CHECK(!is_static || hooks > 0, here(), "static_graph=True, but ", names_[index],
                        " is used now and was not in the first backward, or more often than there");
            if (is_static && --hooks > 0) return;
            if (torch_->should_rebuild_buckets()) TorchReducer::push_rebuilt(*torch_, index);
            mark_ready(index, &incoming);
        });
    }

    // `incoming` is null if this backward does not use the parameter.
    void mark_ready(size_t index, const at::Tensor* incoming) {
        auto& gradient = gradients_[index];
        TORCH_CHECK(!gradient.is_ready, "Expected to mark a variable ready only once. ", here(), names_[index],
                    " got a gradient twice in one backward, or was unused by what forward returned and got one all the same: with "
                    "several reentrant checkpoints over one part of the model, say. ",
                    TorchReducer::is_static(*torch_) ? "use_reentrant=False helps" : "use_reentrant=False, or static_graph=True, help");
        gradient.is_ready = true;
        place(gradient, incoming);
        auto& bucket = buckets_[gradient.bucket];
        if (--bucket.missing == 0) {
            while (next_ < buckets_.size() && buckets_[next_].missing == 0 && launch()) ++next_;
        }
        if (next_ > 0) check(flow_progress(own_.get()));
        if (++ready_ == gradients_.size()) {
            torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] { self->finish(); });
        }
    }

    // Puts a gradient into shared memory: where it is, or in its place. One of a parameter that is not used stays as it is if no rank
    // uses that.
    void place(Gradient& gradient, const at::Tensor* incoming) {
        at::NoGradGuard no_grad;
        const auto& grad = gradient.param.grad();
        auto& bucket = buckets_[gradient.bucket];
        const auto scale = 1.0 / static_cast<double>(flow_world_size(memory_.get()));
        if (grad.defined()) {
            TORCH_CHECK(grad.layout() == at::kStrided && grad.is_cpu(), here(), "the gradient of ", name_of(gradient), " is ", grad.layout(),
                        " on ", grad.device(), ": only modules that are said to be sparse may have sparse gradients");
            TORCH_CHECK(grad.scalar_type() == bucket.type, here(), "the gradient of ", name_of(gradient), " is ", grad.scalar_type(),
                        ", and its parameter ", bucket.type);
            const bool stays = incoming && gradient.is_large && !grad.requires_grad() && !grad.is_neg() &&
                               has_layout(grad, gradient.layout) && is_exclusive(grad, *incoming) && is_last(gradient) &&
                               flow_is_shared(memory_.get(), grad.const_data_ptr(), grad.nbytes());
            gradient.reduced = stays ? grad : place_of(gradient);
            if (stays) in_place_ += grad.nbytes();
            if (bucket.divides_first) {
                at::mul_out(gradient.reduced, grad.detach(), at::native::wrapped_scalar_tensor(scale));
            } else if (!stays) {
                copy(gradient.reduced, grad);
            }
        } else {
            gradient.reduced = place_of(gradient).zero_();
        }
        if (gradient.is_large) bucket.pieces[gradient.piece] = elements(gradient.reduced, bucket.code);
    }

    const std::string& name_of(const Gradient& gradient) const { return names_[&gradient - gradients_.data()]; }

    at::Tensor& place_of(Gradient& gradient) {
        auto& place = gradient.place;
        if (!place.defined()) {
            const auto memory = shared({gradient.param.numel()}, buckets_[gradient.bucket].type);
            place = memory.as_strided(gradient.param.sizes(), gradient.layout);
        }
        return place;
    }

    // Launches the next bucket. False if too many are under way.
    bool launch() {
        const auto& bucket = buckets_[next_];
        bool launched = true;
        if (!bucket.pieces.empty()) {
            check(flow_launch_bucket(own_.get(), bucket.pieces.data(), bucket.pieces.size(), static_cast<uint32_t>(next_),
                                     bucket.divides_first ? FLOW_SUM : FLOW_AVG, &launched));
        }
        return launched;
    }

    // At the end of the backward that brought the last gradient.
    void finish() {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        expects_ = false;
        failing([&] {
            for (; next_ < buckets_.size(); ++next_) {
                while (!launch()) check(flow_finish_buckets(own_.get()));
            }
            check(flow_finish_buckets(own_.get()));
            const auto used = used_anywhere();
            for (size_t index = 0; index < gradients_.size(); ++index) {
                if (used.empty() || used[index]) write_back(gradients_[index]);
            }
            if (TorchReducer::is_static(*torch_) && torch_->should_rebuild_buckets()) {
                for (const auto unused : TorchReducer::unused(*torch_)) TorchReducer::push_rebuilt(*torch_, unused);
            }
        });
        release();
        TorchReducer::hook_called(*torch_) = false;
        is_under_way_ = false;
    }

    // Returns which parameters some rank has used; empty if all have been.
    std::vector<int32_t> used_anywhere() {
        const bool is_static = TorchReducer::is_static(*torch_);
        if (!is_static && !is_dynamic()) return {};
        auto& map = TorchReducer::local_used_map(*torch_);
        const auto* const begin = map.const_data_ptr<int32_t>();
        std::vector<int32_t> used(begin, begin + map.numel());
        if (is_dynamic()) {
            check(flow_all_reduce(own_.get(), {used.data(), used.size(), FLOW_I32}, FLOW_MAX));
            map.zero_();
        }
        return used;
    }

    // Makes the parameter's gradient what was reduced.
    void write_back(Gradient& gradient) {
        auto& grad = gradient.param.mutable_grad();
        const auto& reduced = gradient.reduced;
        if (!grad.defined()) {
            at::NoGradGuard no_grad;
            const bool is_place = gradient.place.is_same(reduced);
            grad = is_place ? torch::autograd::utils::clone_obey_contract(reduced, gradient.param) : reduced;
        } else if (grad.const_data_ptr() == reduced.const_data_ptr()) {
            grad.unsafeGetTensorImpl()->bump_version();
        } else if (grad.requires_grad() || grad.scalar_type() != reduced.scalar_type()) {
            grad.copy_(reduced);
        } else {
            copy(grad, reduced);
            grad.unsafeGetTensorImpl()->bump_version();
        }
    }

    void release() {
        for (auto& gradient : gradients_) gradient.reduced.reset();
    }

    // An error of this rank is one of all ranks: none waits for gradients that will not come.
    template <typename Run>
    void failing(const Run& run) {
        try {
            run();
        } catch (const c10::Error& error) {
            fail(error.what_without_backtrace());
            throw;
        } catch (const std::exception& error) {
            fail(error.what());
            throw;
        }
    }

    void on_failed_backward() {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        if (is_under_way_) fail(here() + "its backward ended before all gradients were there, see its own error");
    }

    void watch_backward() {
        const int task = torch::autograd::get_current_graph_task_id();
        if (std::exchange(task_, task) == task) return;
        torch::autograd::Engine::get_default_engine().queue_callback(
            [watch = std::make_shared<Watch>(shared_from_this())] { watch->is_over = true; });
    }

    // The process group's, for its memory.
    const Group memory_;
    const std::function<Group()> new_group_;
    const std::shared_ptr<c10d::Reducer> torch_;
    const std::vector<std::string> names_;
    std::set<size_t> lengths_;
    std::vector<std::pair<NodePtr, uintptr_t>> hooks_;

    // A backward that cannot be watched ends in a hook.
    std::recursive_mutex mutex_;
    // For reductions only, so that they are in no order with other collectives of the program.
    Group own_;
    std::vector<Gradient> gradients_;  // as torch's Reducer numbers parameters
    std::vector<Bucket> buckets_;
    bool has_rebuilt_bucket_ = false;
    // The backward that is expected, or under way: gradients that are ready, and the next bucket to launch.
    bool expects_ = false;
    bool is_under_way_ = false;
    bool marked_unused_ = false;
    size_t ready_ = 0;
    size_t next_ = 0;
    size_t in_place_ = 0;
    int task_ = -1;
    // Why this is of no more use.
    std::string failure_;
};

}  // namespace flow
