// Gradients that are reduced where they are, while backward runs.
#pragma once

#include <chrono>
#include <functional>
#include <set>

#include <ATen/ScalarOps.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/custom_class.h>

#include "gradient_layout.h"
#include "gradient_memory.h"
#include "sparse.h"
#include "stats.h"
#include "tensors.h"
#include "torch_reducer.h"

namespace flow {

// Does what the Reducer of torch's DistributedDataParallel does in a backward, but copies no large gradient: backward computes
// them in shared memory, and all ranks reduce them there. Which gradients are expected, and how they are divided into buckets, is
// decided by torch's Reducer, beside which this stands, and which can do any single backward instead.
//
// Small gradients, and those that lie elsewhere, have another layout or share their memory, are copied to a place of their own and
// back. So are those that a communication hook sends as another type.
//
// A backward that fails makes this unusable, on all ranks; the process group stays usable.
class InPlaceReducer final : public torch::CustomClassHolder {
public:
    // `new_group` makes a group of the same ranks, when all call it. `names` are the parameters'.
    InPlaceReducer(Group group, std::function<Group()> new_group, std::shared_ptr<c10d::Reducer> torch, std::vector<std::string> names)
        : memory_(std::move(group)), new_group_(std::move(new_group)), torch_(std::move(torch)), names_(std::move(names)) {
        const auto& params = TorchReducer::params(*torch_);
        TORCH_INTERNAL_ASSERT(names_.size() == params.size());
        for (size_t index = 0; index < params.size(); ++index) {
            const auto& param = params[index];
            const bool is_sparse = TorchReducer::expects_sparse(*torch_, index);
            gradients_.push_back({param, layout_of(param), is_sparse});
        }
        for (size_t index = 0; index < params.size(); ++index) {
            const auto& node = TorchReducer::grad_accumulators(*torch_)[index];
            hooks_.emplace_back(node, node->add_post_hook(std::make_unique<Hook>(this, index)));
        }
        send_as(std::nullopt);
    }

    ~InPlaceReducer() override {
        for (const auto& [node, hook] : hooks_) node->del_post_hook(hook);
        unshare_lengths();
    }

    // Does from now on what a communication hook of PyTorch's does: gradients are sent as `type`, or as what they are, and are divided
    // by the number of ranks before they are summed up.
    void follow_hook(std::optional<at::ScalarType> type) {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        has_hook_ = true;
        send_as(type);
    }

    // Has gradients sent as `type` from now on, of parameters that forward and backward have as `computed`.
    void reduce_as(at::ScalarType type, std::optional<at::ScalarType> computed) {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        computed_as_ = computed;
        send_as(type);
    }

    // Returns the parameters.
    std::vector<at::Tensor> params() const { return TorchReducer::params(*torch_); }

    // In backward, when the gradient of a parameter that was cast comes: keeps it until it is reduced where it is, and returns nothing.
    // Else returns it as what the parameter is.
    at::Tensor take(size_t index, at::Tensor incoming) {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        auto& gradient = gradients_[index];
        const auto type = gradient.param.scalar_type();
        // Of several forwards.
        const auto earlier = std::exchange(gradient.taken, {});
        if (earlier.defined()) return earlier.to(type).add_(incoming.to(type));
        if (!can_take(gradient, incoming)) return incoming.to(type);
        // Torch's Reducer notes it of a parameter that has a gradient.
        if (is_dynamic()) TorchReducer::local_used_map(*torch_).data_ptr<int32_t>()[index] = 1;
        gradient.taken = std::move(incoming);
        return {};
    }

    // Sums gradients up from now on in the group that `new_group` makes, of all ranks or of some, when these call it; without it each
    // rank keeps its own.
    void sum_in(std::function<Group()> new_group) {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        sums_ = static_cast<bool>(new_group);
        new_summing_ = std::move(new_group);
        summing_.reset();
    }

    // Has the hook that is registered know, from now on, when a backward is over: it gets a bucket without parameters.
    void tell_hook() {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        tells_hook_ = true;
    }

    // Leaves everything to torch's Reducer. Returns whether that now expects a backward: there has been a forward.
    bool leave() {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        std::lock_guard<std::mutex> torch_lock(TorchReducer::mutex(*torch_));
        return TorchReducer::expects_hooks(*torch_) |= std::exchange(expects_, false);
    }

    // Makes the groups that reductions go in. All ranks call this, or none: then their first backward makes them.
    void connect() {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        if (!own_) own_ = new_group_();
        if (sums_ && !summing_) summing_ = new_summing_ ? new_summing_() : own_;
    }

    // After torch's Reducer has been prepared for a backward: takes that over. Left to it are the first backward of a static graph,
    // in which it learns what the graph is, and one whose gradients go to a context of distributed autograd; with uneven inputs all of
    // a static graph, as ranks that have joined do not know which one is the first. `counts_ranks`: gradients are divided by the number
    // of ranks that have not joined, which are counted in each forward.
    void expect(bool is_uneven, bool counts_ranks) {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        failing([&] {
            {
                std::lock_guard<std::mutex> torch_lock(TorchReducer::mutex(*torch_));
                const auto calls = TorchReducer::backward_calls(*torch_);
                const bool is_first = calls == 0 || (calls == 1 && TorchReducer::hook_called(*torch_));
                const bool has_context = torch::distributed::autograd::DistAutogradContainer::currentContextId() != -1;
                const bool is_static = TorchReducer::is_static(*torch_);
                TORCH_CHECK(!has_context || !is_uneven || is_static, here(),
                            "gradients that go to a context of distributed autograd are not reduced within join()");
                expects_ = !has_context && !(is_static && (is_first || is_uneven));
                if (!expects_) return;
                TorchReducer::expects_hooks(*torch_) = false;
            }
            begin();
            is_uneven_ = is_uneven;
            counts_ranks_ = counts_ranks;
            for (size_t index = 0; index < gradients_.size(); ++index) {
                auto& gradient = gradients_[index];
                // A change of type loses hooks.
                TORCH_CHECK(torch::autograd::impl::try_get_grad_accumulator(gradient.param) == hooks_[index].first, here(),
                            "the type of ", names_[index], " has changed since its module was wrapped: wrap it again");
                gradient.is_ready = false;
                gradient.taken.reset();
                gradient.hooks = hooks_expected(index);
            }
            marked_unused_ = false;
            ready_ = 0;
            task_ = -1;
        });
    }

    // Reduces zeros while the others reduce a backward's gradients, which they expect with `counts_ranks`: this rank has joined.
    void shadow(bool counts_ranks) {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        check_finished();
        failing([&] {
            at::NoGradGuard no_grad;
            connect();
            begin();
            is_uneven_ = true;
            divisor_ = counts_ranks ? 0 : flow_world_size(memory_.get());
            for (auto& gradient : gradients_) reduce(gradient, nothing_of(gradient));
            finish_buckets();
            used_anywhere();
        });
        release();
        tell_end();
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
        if (summing_ && summing_ != own_) flow_abort(summing_.get(), cause.c_str());
        release();
    }

    // Returns how many bytes of the last backward's gradients were reduced where they were.
    int64_t in_place_bytes() {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        size_t bytes = 0;
        for (const auto& bucket : buckets_) bytes += bucket.in_place;
        return bytes;
    }

    // Returns what the last backward that came to its end has done.
    Stats stats() {
        std::lock_guard<std::mutex> lock(stats_mutex_);
        return stats_;
    }

private:
    using Clock = std::chrono::steady_clock;
    using Pointer = c10::intrusive_ptr<InPlaceReducer>;
    // A pointer to a node, of another type in each version of PyTorch.
    using NodePtr = std::decay_t<decltype(TorchReducer::grad_accumulators(std::declval<c10d::Reducer&>())[0])>;

    struct Gradient {
        at::Tensor param;
        // The strides that it has on all ranks: they reduce what lies at the same place in memory.
        std::vector<int64_t> layout;
        // It is the sum of entries, which all ranks gather at the end of backward.
        bool is_sparse;
        // It is a piece of its bucket. Small ones are one piece together.
        bool is_large = false;
        size_t bucket = 0;
        size_t piece = 0;
        // Shared memory for it; of large ones only where it was needed.
        at::Tensor place;
        // The tensor that is reduced in this backward: the gradient itself, or its place.
        at::Tensor reduced;
        // What came for a parameter that was cast, and is not yet accumulated.
        at::Tensor taken;
        // The number of hooks that are still to come before it is ready.
        int hooks = 1;
        bool is_ready = false;
    };

    // Gradients of one type that are reduced together.
    struct Bucket {
        std::vector<size_t> members;
        // The type that is sent.
        at::ScalarType type;
        // The places of small gradients, the first of the pieces; undefined if there are none.
        at::Tensor small;
        std::vector<flow_buffer> pieces;
        // The number of gradients that are not ready.
        size_t missing = 0;
        // This backward has brought one.
        bool is_used = false;
        // The names of its parameters.
        std::shared_ptr<const std::vector<std::string>> names;
        // Bytes that are sent, and of these those of gradients that are reduced where they are.
        size_t bytes = 0;
        size_t in_place = 0;
        // When all were ready, and when they were reduced.
        Clock::time_point ready;
        Clock::time_point done;
    };

    struct Hook final : torch::autograd::FunctionPostHook {
        Hook(InPlaceReducer* reducer, size_t index) : reducer(reducer), index(index) {}

        torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                                  const torch::autograd::variable_list& inputs) override {
            const auto own = Pointer::reclaim_copy(reducer);  // a hook of the program's may drop the module
            own->on_gradient(index, inputs.empty() ? at::Tensor() : inputs[0]);
            return outputs;
        }

        InPlaceReducer* const reducer;
        const size_t index;
    };

    struct Watch;

    // Of a parameter, torch's Reducer's and this one's.
    static constexpr size_t kOwnHooks = 2;

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

    // Has backward compute large gradients in shared memory.
    void share_lengths() {
        for (const auto& gradient : gradients_) {
            if (gradient.is_large) lengths_.insert(bytes_of(gradient));
        }
        if (auto* const allocator = GradientAllocator::get()) {
            for (const auto length : lengths_) allocator->add(length, memory_);
        }
    }

    void unshare_lengths() {
        if (auto* const allocator = GradientAllocator::get()) {
            for (const auto length : lengths_) allocator->remove(length, memory_);
        }
        lengths_.clear();
    }

    // Returns the type that gradients of this type are sent as.
    at::ScalarType sent_type(at::ScalarType own) const { return sent_as_.value_or(own); }

    // Returns the type in which backward computes a gradient.
    at::ScalarType computed_type(const Gradient& gradient) const { return computed_as_.value_or(gradient.param.scalar_type()); }

    size_t bytes_of(const Gradient& gradient) const { return gradient.param.numel() * c10::elementSize(computed_type(gradient)); }

    void send_as(std::optional<at::ScalarType> type) {
        sent_as_ = type;
        unshare_lengths();
        for (auto& gradient : gradients_) {
            const auto computed = computed_type(gradient);
            gradient.is_large = !gradient.is_sparse && bytes_of(gradient) >= kMinShared &&
                                sent_type(gradient.param.scalar_type()) == computed;
            gradient.place.reset();
        }
        share_lengths();
        buckets_.clear();
        if (expects_) begin();
    }

    // Begins a reduction.
    void begin() {
        if (buckets_.empty() || TorchReducer::has_rebuilt_bucket(*torch_) != has_rebuilt_bucket_) make_buckets();
        for (auto& bucket : buckets_) {
            bucket.missing = bucket.members.size();
            bucket.is_used = false;
            bucket.bytes = bucket.in_place = 0;
        }
        next_ = 0;
    }

    // Whether a bucket's gradients are divided before they are summed up; else the mean is computed at once. A power of two can as well
    // divide the sum: the bits are the same, but of numbers at the end of f16's small range.
    bool divides_first(const Bucket& bucket) const {
        const auto ranks = flow_world_size(memory_.get());
        return has_hook_ || divisor_ != ranks || (ranks & (ranks - 1)) != 0 || bucket.type == at::kHalf;
    }

    // Divides the parameters into buckets as torch's Reducer does.
    void make_buckets() {
        at::NoGradGuard no_grad;
        has_rebuilt_bucket_ = TorchReducer::has_rebuilt_bucket(*torch_);
        buckets_.clear();
        for (const auto& theirs : TorchReducer::buckets(*torch_)) {
            const auto type = sent_type(theirs.variables.at(0).scalar_type());
            Bucket bucket{theirs.variable_indices, type};
            std::vector<std::string> names;
            for (const auto index : bucket.members) names.push_back(names_[index]);
            bucket.names = std::make_shared<const std::vector<std::string>>(std::move(names));
            int64_t small = 0;
            for (const auto index : bucket.members) {
                const auto& gradient = gradients_[index];
                if (!gradient.is_large && !gradient.is_sparse) small += gradient.param.numel();
            }
            if (small > 0) {
                bucket.small = shared({small}, type);
                bucket.pieces.push_back(real_elements(bucket.small));
            }
            int64_t start = 0;
            for (const auto index : bucket.members) {
                auto& gradient = gradients_[index];
                gradient.bucket = buckets_.size();
                if (gradient.is_sparse) continue;
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
                began_ = Clock::now();
                divisor_ = number_of_ranks();
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
        reduce(gradient, place(gradient, incoming));
        auto& bucket = buckets_[gradient.bucket];
        bucket.is_used |= incoming != nullptr;
        if (--bucket.missing == 0) {
            bucket.ready = Clock::now();
            while (next_ < buckets_.size() && buckets_[next_].missing == 0 && launch()) ++next_;
        }
        if (next_ > 0 && sums_) check(flow_progress(summing_.get()));
        if (++ready_ == gradients_.size()) {
            torch::autograd::Engine::get_default_engine().queue_callback([self = Pointer::reclaim_copy(this)] { self->finish(); });
        }
    }

    // Whether a gradient that nobody else uses can be reduced where it is.
    bool can_stay(const Gradient& gradient, const at::Tensor& own) const {
        return gradient.is_large && own.scalar_type() == computed_type(gradient) && own.layout() == at::kStrided && own.is_cpu() &&
               !own.requires_grad() && !own.is_neg() && !own.is_conj() && !own._is_zerotensor() && has_layout(own, gradient.layout) &&
               flow_is_shared(memory_.get(), own.const_data_ptr(), own.nbytes());
    }

    // Whether a gradient of a parameter that was cast will be all that comes, so that none is accumulated, and nobody else sees it.
    bool can_take(const Gradient& gradient, const at::Tensor& incoming) const {
        using namespace torch::autograd;
        const auto& node = hooks_[&gradient - gradients_.data()].first;
        const bool has_hooks = !node->pre_hooks().empty() || !impl::hooks(gradient.param).empty() ||
                               impl::post_acc_grad_hooks(gradient.param) || node->post_hooks().size() > kOwnHooks || !is_last(gradient);
        // autograd.grad, or a backward with inputs, for which gradients may be more than accumulated.
        const auto* const executed = get_current_graph_task_exec_info();
        const bool is_partial = executed && !executed->empty();
        if (!expects_ || has_hook_ || has_hooks || is_partial || gradient.param.grad().defined() || incoming.use_count() > 1 ||
            !can_stay(gradient, incoming)) {
            return false;
        }
        // What it is a view of goes with it, and would look like another user.
        if (incoming.is_view()) incoming.unsafeGetTensorImpl()->set_autograd_meta(nullptr);
        return incoming.storage().use_count() == 1;
    }

    // Returns the number of ranks that gradients are divided by: of all, of those that sum them up, or of those that have not joined.
    size_t number_of_ranks() const {
        if (!sums_) return 1;
        if (has_hook_ || !counts_ranks_) return flow_world_size(summing_.get());
        const auto& work = TorchReducer::forward_pass_work(*torch_).workHandle;
        work->wait();
        return work->result().at(0).item<int64_t>();
    }

    // Returns what is to be reduced of a gradient: itself where it is, or its place, or what there is of a sparse one. One of a parameter
    // that is not used stays as it is if no rank uses that.
    at::Tensor place(Gradient& gradient, const at::Tensor* incoming) {
        at::NoGradGuard no_grad;
        auto& grad = gradient.param.mutable_grad();
        // A sign's, say, is zeros that have no memory.
        if (grad.defined() && grad._is_zerotensor()) grad.reset();
        auto taken = std::exchange(gradient.taken, {});
        if (taken.defined() && grad.defined()) grad = grad + taken;
        if (taken.defined() && !grad.defined()) {
            auto& bucket = buckets_[gradient.bucket];
            bucket.in_place += taken.nbytes();
            if (divides_first(bucket)) at::mul_out(taken, taken, at::native::wrapped_scalar_tensor(1.0 / static_cast<double>(divisor_)));
            return taken;
        }
        if (!grad.defined()) return nothing_of(gradient);
        const auto type = gradient.param.scalar_type();
        TORCH_CHECK(grad.scalar_type() == type, here(), "the gradient of ", name_of(gradient), " is ", grad.scalar_type(),
                    ", and its parameter ", type);
        if (gradient.is_sparse) {
            TORCH_CHECK(grad.is_sparse() && grad.is_cpu(), here(), "the gradient of ", name_of(gradient), " is ", grad.layout(), " on ",
                        grad.device(), ": modules that are said to be sparse must have sparse gradients");
            return grad;
        }
        TORCH_CHECK(grad.layout() == at::kStrided && grad.is_cpu(), here(), "the gradient of ", name_of(gradient), " is ", grad.layout(),
                    " on ", grad.device(), ": only modules that are said to be sparse may have sparse gradients");
        const bool stays = incoming && can_stay(gradient, grad) && is_exclusive(grad, *incoming) && is_last(gradient);
        auto reduced = stays ? grad : place_of(gradient);
        if (stays) buckets_[gradient.bucket].in_place += grad.nbytes();
        if (has_hook_) {
            // In the type that is sent, as the hook does.
            if (!stays) reduced.copy_(grad.detach());
            if (divisor_ != 1) reduced.div_(static_cast<double>(divisor_));
        } else if (divides_first(buckets_[gradient.bucket])) {
            at::mul_out(reduced, grad.detach(), at::native::wrapped_scalar_tensor(1.0 / static_cast<double>(divisor_)));
        } else if (!stays) {
            copy_elements(reduced, grad.detach());
        }
        return reduced;
    }

    // Returns what a rank without a gradient adds.
    at::Tensor nothing_of(Gradient& gradient) {
        at::NoGradGuard no_grad;
        if (!gradient.is_sparse) return place_of(gradient).zero_();
        // Of an embedding, whose entries are rows.
        const auto& param = gradient.param;
        return at::_sparse_coo_tensor_with_dims(1, param.dim() - 1, param.sizes(), param.options().layout(at::kSparse));
    }

    void reduce(Gradient& gradient, at::Tensor tensor) {
        gradient.reduced = std::move(tensor);
        auto& bucket = buckets_[gradient.bucket];
        if (gradient.is_large) bucket.pieces[gradient.piece] = real_elements(gradient.reduced);
        if (!gradient.is_sparse) bucket.bytes += gradient.reduced.nbytes();
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
        ++Seen::operations;
        auto& bucket = buckets_[next_];
        // What one rank does not use, none does. A rank that has joined does not know what the others use.
        const bool is_unused = TorchReducer::skips_unused(*torch_) && !bucket.is_used && !is_uneven_;
        bool launched = true;
        bucket.done = bucket.ready;
        if (is_unused || !sums_) {
            bucket.bytes = 0;
        } else if (!bucket.pieces.empty()) {
            check(flow_launch_bucket(summing_.get(), bucket.pieces.data(), bucket.pieces.size(), static_cast<uint32_t>(next_),
                                     divides_first(bucket) ? FLOW_SUM : FLOW_AVG, &launched));
        }
        return launched;
    }

    // Launches the buckets that are left, and waits for all.
    void finish_buckets() {
        for (; next_ < buckets_.size(); ++next_) {
            while (!launch()) check(flow_finish_buckets(summing_.get()));
        }
        if (!sums_) return;
        check(flow_finish_buckets(summing_.get()));
        note_done();
        for (const auto& gradient : gradients_) {
            if (!gradient.is_sparse) continue;
            auto& bucket = buckets_[gradient.bucket];
            bucket.bytes += sum_sparse_gradient(gradient.reduced);
            bucket.done = Clock::now();
        }
    }

    // Buckets that were launched are reduced, since some time; the age of one that was not is that of an earlier backward's.
    void note_done() {
        for (size_t number = 0; number < buckets_.size(); ++number) {
            const std::chrono::duration<double> age(flow_bucket_age(summing_.get(), static_cast<uint32_t>(number)));
            auto& done = buckets_[number].done;
            if (age.count() >= 0) done = std::max(done, Clock::now() - std::chrono::duration_cast<Clock::duration>(age));
        }
    }

    // Returns how many bytes this rank has sent.
    size_t sum_sparse_gradient(const at::Tensor& gradient) const {
        at::NoGradGuard no_grad;
        // Two embeddings' gradients may share their values.
        const auto sent = gradient.to(sent_type(gradient.scalar_type())).div(static_cast<double>(divisor_)).coalesce();
        const auto bytes = sent.indices().nbytes() + sent.values().nbytes();
        sum_sparse(summing_.get(), sent);
        gradient.copy_(sent);
        return bytes;
    }

    // At the end of the backward that brought the last gradient.
    void finish() {
        std::lock_guard<std::recursive_mutex> lock(mutex_);
        const auto backward_end = Clock::now();
        expects_ = false;
        failing([&] {
            finish_buckets();
            wait_for_buffers();
            const auto used = used_anywhere();
            for (size_t index = 0; index < gradients_.size(); ++index) {
                if (used.empty() || used[index]) write_back(gradients_[index]);
            }
            if (TorchReducer::is_static(*torch_) && torch_->should_rebuild_buckets()) {
                for (const auto unused : TorchReducer::unused(*torch_)) TorchReducer::push_rebuilt(*torch_, unused);
            }
            note_stats(backward_end);
            flow_end_step();
        });
        release();
        TorchReducer::hook_called(*torch_) = false;
        is_under_way_ = false;
        tell_end();
    }

    void tell_end() {
        if (!tells_hook_) return;
        c10d::GradBucket none(0, 1, at::empty({0}), {}, {}, {}, {}, std::nullopt);
        torch_->run_comm_hook(none)->waitAndThrow();
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

    void note_stats(Clock::time_point backward_end) {
        const auto since = [](Clock::time_point start, Clock::time_point end) { return std::chrono::duration<double>(end - start).count(); };
        std::lock_guard<std::mutex> lock(stats_mutex_);
        stats_ = {stats_.backwards + 1, {}, since(began_, backward_end), since(backward_end, Clock::now())};
        for (const auto& bucket : buckets_) {
            const auto behind = since(bucket.ready, std::min(bucket.done, backward_end));
            stats_.buckets.push_back({bucket.bytes, bucket.names, bucket.in_place, since(began_, bucket.ready),
                                      since(bucket.ready, bucket.done), std::max(behind, 0.0)});
        }
    }

    // A hook may share buffers until here.
    void wait_for_buffers() {
        const auto futures = std::exchange(TorchReducer::installed_futures(*torch_), std::nullopt);
        if (futures) c10::collectAll(*futures)->waitAndThrow();
    }

    // Makes the parameter's gradient what was reduced.
    void write_back(Gradient& gradient) {
        auto& grad = gradient.param.mutable_grad();
        const auto& reduced = gradient.reduced;
        if (gradient.is_sparse) {
            grad = reduced;
        } else if (!grad.defined()) {
            at::NoGradGuard no_grad;
            const auto type = gradient.param.scalar_type();
            if (reduced.scalar_type() != type) {
                grad = reduced.to(type);
            } else {
                const bool is_place = gradient.place.is_same(reduced);
                grad = is_place ? torch::autograd::utils::clone_obey_contract(reduced, gradient.param) : reduced;
            }
        } else if (grad.const_data_ptr() == reduced.const_data_ptr()) {
            grad.unsafeGetTensorImpl()->bump_version();
        } else if (grad.requires_grad()) {
            grad.copy_(reduced);
        } else {
            copy_elements(grad, reduced);
            grad.unsafeGetTensorImpl()->bump_version();
        }
    }

    void release() {
        for (auto& gradient : gradients_) {
            gradient.reduced.reset();
            gradient.taken.reset();
        }
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

    void watch_backward();

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
    // Gradients are summed up in this group, which is `own_` or what this function makes; or not at all.
    Group summing_;
    std::function<Group()> new_summing_;
    bool sums_ = true;
    std::vector<Gradient> gradients_;  // as torch's Reducer numbers parameters
    std::vector<Bucket> buckets_;
    bool has_rebuilt_bucket_ = false;
    // There is a communication hook.
    bool has_hook_ = false;
    // What gradients are sent as, if not as what they are.
    std::optional<at::ScalarType> sent_as_;
    // What backward computes them as, if not as what parameters are.
    std::optional<at::ScalarType> computed_as_;
    bool tells_hook_ = false;
    // The backward that is expected, or under way: gradients that are ready, and the next bucket to launch.
    bool expects_ = false;
    bool is_under_way_ = false;
    bool marked_unused_ = false;
    // Other ranks may have joined.
    bool is_uneven_ = false;
    // These are not counted in what gradients are divided by.
    bool counts_ranks_ = false;
    // What gradients are divided by.
    size_t divisor_ = 0;
    size_t ready_ = 0;
    size_t next_ = 0;
    Clock::time_point began_;
    int task_ = -1;
    // The other one is held while backward waits for a hook's futures, and who completes these may ask for the stats before that.
    std::mutex stats_mutex_;
    Stats stats_;
    // Why this is of no more use.
    std::string failure_;
};

// Goes with a backward, and notices if that does not reach its end.
struct InPlaceReducer::Watch {
    explicit Watch(InPlaceReducer* reducer) : reducer(Pointer::reclaim_copy(reducer)) {}
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
    ~Watch() {
        const auto own = reducer.lock();
        if (own && !is_over) own->on_failed_backward();
    }

    const c10::weak_intrusive_ptr<InPlaceReducer> reducer;
    bool is_over = false;
};

inline void InPlaceReducer::watch_backward() {
    const int task = torch::autograd::get_current_graph_task_id();
    if (std::exchange(task_, task) == task) return;
    torch::autograd::Engine::get_default_engine().queue_callback([watch = std::make_shared<Watch>(this)] { watch->is_over = true; });
}

}  // namespace flow
