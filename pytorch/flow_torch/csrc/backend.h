// torch.distributed's backend "flow": flow-comm's collectives for tensors on CPUs.
#pragma once

#include <algorithm>
#include <set>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "bucket.h"
#include "called_type.h"
#include "meeting.h"
#include "membership.h"
#include "monitored_barrier.h"
#include "sparse.h"
#include "tensors.h"

namespace flow {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

inline void check_tag(int tag) {
    TORCH_CHECK_VALUE(tag >= 0, "flow: a tag must not be negative: ", tag);
}

class FlowBackend final : public c10d::Backend {
public:
    FlowBackend(Group group, Milliseconds timeout)
        : Backend(static_cast<int>(flow_rank(group.get())), static_cast<int>(flow_world_size(group.get()))),
          options_(c10::make_intrusive<Options>("flow", timeout)),
          membership_(std::make_unique<Membership>(std::move(group))) {
        init();
    }

    // A group without ranks, until reconfigure() gives it some. `handle`: this process' name there.
    FlowBackend(StorePtr store, std::string handle, int rank, int size, Milliseconds timeout)
        : Backend(rank, size),
          options_(c10::make_intrusive<Options>("flow", timeout)),
          store_(std::move(store)),
          handle_(std::move(handle)) {
        init();
    }

    ~FlowBackend() override { end(); }

    // Where weak pointers are left, these keep the memory, and the destructor comes with the last of them.
    void release_resources() override {
        end();
        membership_.reset();
    }

    // For the last owner, who gets no error.
    void end() {
        // Operations under way may have to call Python.
        const GilRelease released;
        const PrintedInterrupts printed;
        try {
            shutdown();
        } catch (const std::exception&) {
            // The interrupt, which has been printed.
        }
    }

    // destroy_process_group calls this; programs may still have the group.
    void shutdown() override {
        if (membership_) membership_->close();
    }

    Group group() const { return membership().group; }

    // Another group of the same ranks, which all make in the same order.
    Group duplicate() { return membership().duplicate(options_->timeout); }

    // Leaves the group, and those that were made from it, which have no ranks then. What is pending fails. Otherwise the other ranks
    // finish their last operations: they do not need this one any more.
    void leave() {
        const GilRelease released;
        std::unique_lock<std::mutex> lock(leaving_);
        const auto before = std::move(membership_);
        const auto parts = std::exchange(parts_, {});
        lock.unlock();
        for (const auto& part : parts) {
            if (const auto own = part.lock()) own->leave();
        }
        if (!before) return;
        if (!before->is_idle()) flow_abort(before->group.get(), "it was reconfigured with operations that were pending");
        before->close();
    }

    // The job's next group: see flow_reconfigure. Leaves this one, from which a later call goes on if this one fails.
    Group next_of_job(Milliseconds timeout) {
        if (membership_) left_ = membership_->group;
        {
            // Also in sub-groups: nobody receives while the ranks agree.
            const GilRelease released;
            Lane::fail_all("it reconfigures the job");
        }
        leave();
        TORCH_CHECK_VALUE(left_, "flow: reconfigure() is for the group that it has made last");
        flow_group* made = nullptr;
        check(flow_reconfigure(within(left_, timeout).get(), &made));
        left_ = nullptr;
        return own(made);
    }

    // Keeps the store for groups that follow from this one.
    void keep_store(StorePtr store) { store_ = std::move(store); }

    const std::string getBackendName() const override { return "flow"; }
    // PyTorch changes those of a group that is to be split, for its parts.
    c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<Options>(*options_); }

    void setTimeout(Milliseconds timeout) override {
        options_->timeout = timeout;
        if (membership_) check(flow_set_timeout(get(), seconds(timeout)));
    }

    void abort() override {
        // Another thread may reconfigure the group just now.
        std::lock_guard<std::mutex> lock(leaving_);
        if (membership_) fail("torch.distributed's abort()");
    }
    // Makes the group unusable, on all ranks.
    void fail(const std::string& cause) { check(flow_abort(get(), cause.c_str())); }
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override { return membership().sequence; }
    bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }

    bool supportsSplitting() const override { return true; }

    c10::intrusive_ptr<Backend> split(const StorePtr& store, const std::vector<int>& ranks,
                                      const c10::intrusive_ptr<Options>& opts) override {
        if (std::find(ranks.begin(), ranks.end(), rank_) == ranks.end()) return nullptr;
        const auto made = new_group_of({ranks.begin(), ranks.end()}, opts->timeout);
        made->keep_store(store);
        return made;
    }

    // A group of some of this group's ranks, which only they make: several of the same ranks in one order.
    c10::intrusive_ptr<FlowBackend> new_group_of(const std::vector<size_t>& ranks, Milliseconds timeout) {
        const auto made = c10::make_intrusive<FlowBackend>(membership().new_group_of(ranks, timeout), timeout);
        std::lock_guard<std::mutex> lock(leaving_);
        std::erase_if(parts_, [](const auto& part) { return part.expired(); });
        parts_.emplace_back(made);
        return made;
    }

    c10::intrusive_ptr<Backend> merge(const StorePtr& store, const c10::intrusive_ptr<Options>& opts, const int& rank,
                                      const int& size) override {
        return meet(store, rank, size, opts->timeout, "merge_remote_group");
    }

    bool supportsShrinking() const override { return true; }

    // A group of the ranks that are left meets anew: the others may have been killed, and this group's own store with them.
    c10::intrusive_ptr<Backend> shrink(const std::vector<int64_t>& excluded, int flags,
                                       const c10::intrusive_ptr<Options>& opts) override {
        const auto left = ranks_without(excluded, size_);
        const auto place = std::find(left.begin(), left.end(), rank_);
        TORCH_CHECK_VALUE(place != left.end(), "flow: shrink_group is for the ranks that are left: rank ", rank_, " is excluded");
        if (flags != 0) abort();  // SHRINK_ABORT
        const auto store = apart(store_, c10::str("flow/shrink/", c10::Join(",", excluded)));
        const auto timeout = opts ? opts->timeout : options_->timeout;
        return meet(store, static_cast<int>(place - left.begin()), static_cast<int>(left.size()), timeout, "shrink_group");
    }

#ifdef C10D_BACKEND_HAS_RECONFIGURE
    bool supportsReconfigure() const override { return !handle_.empty(); }
    c10d::ReconfigureHandle get_reconfigure_handle() const override { return handle_; }

    // Leaves the group of before. The members meet by the uuid: those of another group may have it as well.
    WorkPtr reconfigure(const c10d::ReconfigureOptions& opts) override {
        const auto handles = in_order(opts);
        const auto place = std::find(handles.begin(), handles.end(), handle_);
        TORCH_CHECK_VALUE(supportsReconfigure(), "flow: reconfigure() takes init_process_group with enable_reconfigure=True");
        TORCH_CHECK_VALUE(place != handles.end(), "flow: reconfigure: this process' own handle, ", handle_, ", is to be among the handles");
        TORCH_CHECK_VALUE(uuids_.insert(opts.uuid).second, "flow: reconfigure: the uuid ", opts.uuid, " was already used: give a new one");
        leave();
        const auto store = apart(store_, c10::str("flow/reconfigure/", opts.uuid, "/", handles.front()));
        const auto rank = static_cast<int>(place - handles.begin());
        const auto size = static_cast<int>(handles.size());
        const auto timeout = opts.timeout.value_or(options_->timeout);
        const auto made = meet(store, rank, size, timeout, "reconfigure", c10::str(c10::Join(" ", handles)));
        const auto group = c10::dynamic_intrusive_pointer_cast<FlowBackend>(made)->group();
        check(flow_set_timeout(group.get(), seconds(options_->timeout)));
        {
            std::lock_guard<std::mutex> lock(leaving_);
            membership_ = std::make_unique<Membership>(group);
        }
        rank_ = rank;
        size_ = size;
        // It is over.
        const auto work = operation(OpType::UNKNOWN, {}, {});
        membership().collectives->run(work, Job{[](const flow_group*) {}});
        return work;
    }
#endif

#ifdef C10D_BACKEND_HAS_HOOKS
    bool supportsAbortHooks() const { return true; }  // virtual since PyTorch 2.15
    void registerAbortHook(int64_t id, c10d::AbortHook hook) override { hooks_->failed.add(id, std::move(hook)); }
    void unregisterAbortHook(int64_t id) override { hooks_->failed.remove(id); }
#endif

#if FLOW_HAS_COMPLETION_HOOKS
    bool supportsCompletionHooks() const override { return true; }
    void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override {
        hooks_->completed.add(id, [hook = std::move(hook)](uint64_t key) { hook({key, std::nullopt}); });
    }
    void unregisterCompletionHook(int64_t id) override { hooks_->completed.remove(id); }
#endif

    Tensor allocateTensor(long size, at::TensorOptions options) override {
        const auto tensor = empty_shared(get(), {size}, c10::typeMetaToScalarType(options.dtype()));
        return tensor.defined() ? tensor : at::empty({size}, options);
    }

    WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
        const auto& tensor = only(tensors);
        if (tensor.layout() == at::kSparse) return all_reduce_sparse(tensor, opts);
        const auto op = opts.reduceOp.op_;
        const auto code = reducible(dense(tensor).scalar_type(), op);
        check_bitwise(op, tensor.scalar_type());
        // Known to all ranks alike. Whether backward runs is not: a rank that has joined early, in DDP's join(), is in none.
        const bool is_bucket = opts.asyncOp && !is_seen(tensor);
        if (is_bucket && label(called_type(tensor), op).empty() && tensor.is_contiguous() && tensor.nbytes() >= kMinShared) {
            return reduce_bucket(tensors, *code, op, opts);
        }
        return collective(OpType::ALLREDUCE, tensors, tensors, opts, [this, tensor, op, code](const flow_group* group) {
            fill(tensor, [&](const Tensor& own) {
                if (code) {
                    check(flow_all_reduce(group, elements(own, *code), flow_op(op)));
                } else {
                    const auto all = blocks(own, size_);
                    check(flow_all_gather(group, elements(own), elements(all)));
                    reduce_rows(op, all, own);
                }
            });
        });
    }

    // An all-reduce of few elements takes as long as the work, the options and the calls around it. Does without them, if nothing has to
    // come before, nobody records, and flow-comm can reduce the tensor where it lies.
    bool all_reduce_at_once(const Tensor& tensor, RedOp op) {
        if (is_recorded() || !tensor.is_cpu() || tensor.layout() != at::kStrided) return false;
        // Those of torch.func have no storage.
        if (!tensor.has_storage() || !tensor.is_contiguous()) return false;
        const auto code = reducible(tensor.scalar_type(), op);
        if (!code || !label(called_type(tensor), op).empty()) return false;
        return membership().collectives->run_at_once([&](const flow_group* group) {
            ++membership().sequence;
            ++Seen::operations;
            try {
                check(flow_all_reduce(group, elements(tensor, *code), flow_op(op)));
            } catch (...) {
                hooks_->failed.call();
                throw;
            }
        });
    }

    WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
        return each(OpType::ALLREDUCE_COALESCED, tensors, tensors, opts, [&](size_t i) {
            Tensors one{tensors[i]};
            return allreduce(one, opts);
        });
    }

    WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
        const auto& tensor = dense(only(tensors));
        const auto op = opts.reduceOp.op_;
        const auto code = reducible(tensor.scalar_type(), op);
        check_bitwise(op, tensor.scalar_type());
        return collective(OpType::REDUCE, tensors, tensors, opts, [this, tensor, op, code, root = opts.rootRank](const flow_group* group) {
            const auto own = tensor.contiguous();
            if (code) {
                check(flow_reduce(group, elements(own, *code), flow_op(op), root));
            } else {
                const auto all = blocks(own, rank_ == root ? size_ : 0);
                check(flow_gather(group, elements(own), elements(all), root));
                if (rank_ == root) reduce_rows(op, all, own);
            }
            if (rank_ == root && !own.is_same(tensor)) tensor.copy_(own);
        });
    }

    WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
        const auto& tensor = dense(only(tensors));
        return collective(OpType::BROADCAST, tensors, tensors, opts, [tensor, root = opts.rootRank](const flow_group* group) {
            fill(tensor, [&](const Tensor& own) { check(flow_broadcast(group, elements(own), root)); });
        });
    }

    WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
        const auto& input = dense(only(inputs));
        const auto& output = of_ranks(only(outputs), size_);
        for (const auto& tensor : output) {
            TORCH_CHECK_TYPE(tensor.scalar_type() == input.scalar_type(), "flow: input and outputs must have one type");
        }
        return collective(OpType::ALLGATHER, inputs, output, opts, [input, output](const flow_group* group) {
            const auto all = room_for(output);
            check(flow_all_gather_v(group, elements(input.contiguous()), elements(all), counts(output).data()));
            divide(all, output);
        });
    }

    WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override {
        dense(output);
        dense(input);
        TORCH_CHECK_TYPE(output.scalar_type() == input.scalar_type(), "flow: input and output must have one type");
        return collective(OpType::_ALLGATHER_BASE, {input}, {output}, opts, [output, input](const flow_group* group) {
            fill(output, [&](const Tensor& own) {
                check(flow_all_gather(group, elements(input.contiguous()), elements(own)));
            });
        });
    }

    WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
        return each(OpType::_ALLGATHER_BASE, inputs, outputs, opts,
                    [&](size_t i) { return _allgather_base(outputs.at(i), inputs[i], opts); });
    }

    WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
        Tensors results;
        for (const auto& of_rank : outputs) results.insert(results.end(), of_rank.begin(), of_rank.end());
        return each(OpType::ALLGATHER_COALESCED, inputs, results, opts, [&](size_t i) {
            std::vector<Tensors> output(1);
            for (const auto& of_rank : outputs) output[0].push_back(of_rank.at(i));
            Tensors one{inputs[i]};
            return allgather(output, one, opts);
        });
    }

    WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
        const auto& input = dense(only(inputs));
        const bool is_root = rank_ == opts.rootRank;
        TORCH_CHECK(is_root || outputs.empty(), "flow: only the root gives outputs to gather");
        const auto output = is_root ? of_ranks(only(outputs), size_) : Tensors{};
        alike(output, input);
        return collective(OpType::GATHER, inputs, output, opts, [this, input, output, root = opts.rootRank](const flow_group* group) {
            const auto all = blocks(input, rank_ == root ? size_ : 0);
            check(flow_gather(group, elements(input.contiguous()), elements(all), root));
            divide(all.view(-1), output);
        });
    }

    // Since PyTorch 2.15. The output is the root's only.
    WorkPtr gather_into_tensor(Tensor& output, Tensor& input, const c10d::GatherOptions& opts) {
        const bool is_root = rank_ == opts.rootRank;
        if (is_root) {
            TORCH_CHECK_TYPE(dense(output).scalar_type() == dense(input).scalar_type(), "flow: input and output must have one type");
            TORCH_CHECK_VALUE(output.numel() == input.numel() * size_, "flow: the output must be ", size_, " times as long as the input");
        }
        const auto all = is_root ? output : at::empty({0}, dense(input).options());
        return collective(OpType::GATHER, {input}, {all}, opts, [input, all, root = opts.rootRank](const flow_group* group) {
            fill(all, [&](const Tensor& own) { check(flow_gather(group, elements(input.contiguous()), elements(own), root)); });
        });
    }

    WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
        const auto& output = dense(only(outputs));
        const bool is_root = rank_ == opts.rootRank;
        TORCH_CHECK(is_root || inputs.empty(), "flow: only the root gives inputs to scatter");
        const auto input = is_root ? of_ranks(only(inputs), size_) : Tensors{};
        alike(input, output);
        return collective(OpType::SCATTER, input, outputs, opts, [input, output, root = opts.rootRank](const flow_group* group) {
            const auto all = input.empty() ? Tensor() : joined(input);
            const auto given = all.defined() ? elements(all) : flow_buffer{};
            fill(output, [&](const Tensor& own) { check(flow_scatter(group, given, elements(own), root)); });
        });
    }

    WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
        const auto& output = dense(only(outputs));
        const auto& input = of_ranks(only(inputs), size_);
        alike({input[rank_]}, output);
        const auto op = opts.reduceOp.op_;
        const auto code = reducible(output.scalar_type(), op);
        check_bitwise(op, output.scalar_type());
        // Each rank's output may have its own length.
        return collective(OpType::REDUCE_SCATTER, input, outputs, opts, [this, input, output, op, code](const flow_group* group) {
            fill(output, [&](const Tensor& own) {
                if (code) {
                    const auto all = joined(input);
                    check(flow_reduce_scatter_v(group, elements(all, *code), elements(own, *code), counts(input).data(), flow_op(op)));
                } else {
                    exchange_and_reduce(group, op, joined(input), counts(input), own);
                }
            });
        });
    }

    WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
        dense(output);
        dense(input);
        TORCH_CHECK_TYPE(output.scalar_type() == input.scalar_type(), "flow: input and output must have one type");
        TORCH_CHECK(input.numel() == output.numel() * size_, "flow: the input must be ", size_, " times as long as the output");
        const auto op = opts.reduceOp.op_;
        const auto code = reducible(output.scalar_type(), op);
        check_bitwise(op, output.scalar_type());
        return collective(OpType::_REDUCE_SCATTER_BASE, {input}, {output}, opts, [this, output, input, op, code](const flow_group* group) {
            fill(output, [&](const Tensor& own) {
                const auto all = input.contiguous();
                if (code) {
                    check(flow_reduce_scatter(group, elements(all, *code), elements(own, *code), flow_op(op)));
                } else {
                    exchange_and_reduce(group, op, all, std::vector<size_t>(size_, elements(own).count), own);
                }
            });
        });
    }

    WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
        return each(OpType::_REDUCE_SCATTER_BASE, inputs, outputs, opts,
                    [&](size_t i) { return _reduce_scatter_base(outputs.at(i), inputs[i], opts); });
    }

    WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                          const c10d::AllToAllOptions& opts) override {
        dense(output);
        dense(input);
        TORCH_CHECK_TYPE(output.scalar_type() == input.scalar_type(), "flow: input and output must have one type");
        TORCH_CHECK(input.dim() > 0 && output.dim() > 0, "flow: tensors of all_to_all_single need rows to divide");
        c10d::checkSplitSizes(input_splits, input, size_);
        c10d::checkSplitSizes(output_splits, output, size_);
        const auto parts = [this](const Tensor& tensor, const std::vector<int64_t>& splits) {
            const auto all_rows = tensor.size(0);
            const auto unit = elements(tensor).count / std::max<int64_t>(all_rows, 1);
            const auto rows = splits.empty() ? std::vector<int64_t>(size_, all_rows / size_) : splits;
            std::vector<size_t> counts;
            for (const auto row : rows) counts.push_back(row * unit);
            return counts;
        };
        return collective(OpType::ALLTOALL_BASE, {input}, {output}, opts,
                          [output, input, sent = parts(input, input_splits),
                           received = parts(output, output_splits)](const flow_group* group) {
                              fill(output, [&](const Tensor& own) {
                                  const auto all = input.contiguous();
                                  check(flow_all_to_all_v(group, elements(all), sent.data(), elements(own), received.data()));
                              });
                          });
    }

    WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
        const auto& output = of_ranks(outputs, size_);
        const auto& input = of_ranks(inputs, size_);
        TORCH_CHECK_TYPE(output[0].scalar_type() == input[0].scalar_type(), "flow: inputs and outputs must have one type");
        return collective(OpType::ALLTOALL, inputs, outputs, opts, [output, input](const flow_group* group) {
            const auto from = joined(input), to = room_for(output);
            check(flow_all_to_all_v(group, elements(from), counts(input).data(), elements(to), counts(output).data()));
            divide(to, output);
        });
    }

    WorkPtr send(Tensors& tensors, int to, int tag) override {
        check_tag(tag);
        const auto& tensor = dense(only(tensors));
        return message(OpType::SEND, tensors, {to, kToRank}, [tensor, to, tag](const flow_group* group, Operation&) {
            check(flow_send(group, elements(tensor.contiguous()), to, tag));
        });
    }

    WorkPtr recv(Tensors& tensors, int from, int tag) override {
        check_tag(tag);
        const auto& tensor = dense(only(tensors));
        return message(OpType::RECV, tensors, {from, tag}, [tensor, from, tag](const flow_group* group, Operation& own) {
            fill(tensor, [&](const Tensor& data) { check(flow_recv(group, elements(data), from, tag)); });
            own.set_source(from);
        });
    }

    WorkPtr recvAnysource(Tensors& tensors, int tag) override {
        check_tag(tag);
        const auto& tensor = dense(only(tensors));
        return message(OpType::RECVANYSOURCE, tensors, {kAnyRank, tag}, [tensor, tag](const flow_group* group, Operation& own) {
            size_t from = 0;
            fill(tensor, [&](const Tensor& data) { check(flow_recv_any(group, elements(data), tag, &from)); });
            own.set_source(static_cast<int>(from));
        });
    }

    WorkPtr barrier(const c10d::BarrierOptions& opts) override {
        return collective(OpType::BARRIER, {}, {}, opts, [](const flow_group* group) { check(flow_barrier(group)); });
    }

    void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
        ++Seen::operations;
        const auto timeout = opts.timeout == c10d::kUnsetTimeout ? options_->timeout : opts.timeout;
        monitored_barrier(group(), rank_, size_, timeout, wait_all_ranks);
    }

private:
    Membership& membership() const {
        if (!membership_ && handle_.empty()) {
            C10_THROW_ERROR(DistBackendError, "flow: this group has ended, as the ranks have changed: make it anew");
        }
        TORCH_CHECK(membership_, "flow: this group has no ranks: reconfigure gives it some");
        return *membership_;
    }
    const flow_group* get() const { return membership().group.get(); }

    OperationPtr operation(OpType type, const Tensors& inputs, Tensors results) const {
        return c10::make_intrusive<Operation>(rank_, type, inputs, std::move(results), is_part_ ? nullptr : hooks_);
    }

    // Begins a collective, which is over when this returns, if it is not asynchronous.
    template <typename Options>
    WorkPtr begin(const OperationPtr& operation, const Options& opts, Job job) {
        ++membership().sequence;
        job.timeout = opts.timeout;
        if (opts.asyncOp) {
            membership().collectives->submit(operation, std::move(job));
        } else {
            membership().collectives->run(operation, std::move(job));
        }
        return operation;
    }

    template <typename Options>
    WorkPtr collective(OpType type, const Tensors& inputs, Tensors results, const Options& opts,
                       std::function<void(const flow_group*)> run) {
        Job job{std::move(run)};
        const auto& tensors = inputs.empty() ? results : inputs;
        if (!tensors.empty()) job.elements = label(called_type(tensors[0]), reduction(opts));
        job.renamed = renamed(type);
        return begin(operation(type, inputs, std::move(results)), opts, std::move(job));
    }

    // The group for an operation that flow-comm calls something else: ranks may have blocks of different lengths in it.
    Group renamed(OpType type) const {
        switch (type) {
            case OpType::ALLGATHER: return membership().all_gather;
            case OpType::REDUCE_SCATTER: return membership().reduce_scatter;
            case OpType::ALLTOALL:
            case OpType::ALLTOALL_BASE: return membership().all_to_all;
            default: return nullptr;
        }
    }

    // The reduction of options that have one.
    template <typename Options>
    static std::optional<RedOp> reduction(const Options& opts) {
        if constexpr (requires { opts.reduceOp; }) {
            return opts.reduceOp.op_;
        } else {
            return std::nullopt;
        }
    }

    // One operation that stands for one with each of the inputs, which `start` begins.
    template <typename Options>
    WorkPtr each(OpType type, const Tensors& inputs, const Tensors& results, const Options& opts,
                 const std::function<WorkPtr(size_t)>& start) {
        const auto whole = operation(type, inputs, results);
        std::vector<WorkPtr> works;
        {
            const at::DisableRecordFunctionGuard only_whole;
            is_part_ = true;
            const auto parts_over = c10::make_scope_exit([] { is_part_ = false; });
            for (size_t i = 0; i < inputs.size(); ++i) works.push_back(start(i));
        }
        const auto rethrow = [works](const flow_group*) {
            for (const auto& work : works) {
                if (work->exception()) std::rethrow_exception(work->exception());
            }
        };
        return begin(whole, opts, Job{rethrow});
    }

    template <typename Run>
    WorkPtr message(OpType type, const Tensors& tensors, Peer peer, Run run) {
        const auto operation = this->operation(type, tensors, tensors);
        Job job{[run, own = operation.get()](const flow_group* group) { run(group, *own); }};
        job.elements = label(called_type(tensors[0]), std::nullopt);
        auto& own = membership();
        if (own.collectives->is_forked()) {
            own.collectives->run(operation, std::move(job));
        } else {
            own.submit_message(peer, type != OpType::SEND, operation, std::move(job));
        }
        return operation;
    }

    WorkPtr reduce_bucket(Tensors& tensors, flow_dtype code, RedOp op, const c10d::AllreduceOptions& opts) {
        const auto number = static_cast<uint32_t>(membership().sequence++);
        auto job = bucket_job(get(), membership().staging, tensors[0], code, op, number);
        job.timeout = opts.timeout;
        const auto own = operation(OpType::ALLREDUCE, tensors, tensors);
        membership().collectives->submit(own, std::move(job));
        return own;
    }

    // The sum of sparse tensors: that of everybody's entries.
    WorkPtr all_reduce_sparse(const Tensor& tensor, const c10d::AllreduceOptions& opts) {
        TORCH_CHECK(opts.reduceOp == c10d::ReduceOp::SUM, "unsupported reduction operation: sparse tensors can only be summed up");
        return collective(OpType::_ALLREDUCE_SPARSE, {tensor}, {tensor}, opts,
                          [tensor](const flow_group* group) { sum_sparse(group, tensor); });
    }

    // reduce_scatter of a type or a reduction that flow-comm does not know: `own` is this rank's of the blocks of `all`.
    void exchange_and_reduce(const flow_group* group, RedOp op, const Tensor& all, const std::vector<size_t>& sent,
                             const Tensor& own) {
        const auto received = blocks(own, size_);
        const std::vector<size_t> counts(size_, elements(own).count);
        check(flow_all_to_all_v(group, elements(all), sent.data(), elements(received), counts.data()));
        reduce_rows(op, received, own);
    }

    const c10::intrusive_ptr<Options> options_;
    const std::shared_ptr<Hooks> hooks_ = std::make_shared<Hooks>();
    // Whether this thread begins the parts of an operation.
    static inline thread_local bool is_part_ = false;
    std::mutex leaving_;
    std::unique_ptr<Membership> membership_;
    // Those that were made of some of the ranks.
    std::vector<c10::weak_intrusive_ptr<FlowBackend>> parts_;
    Group left_;  // see next_of_job
    StorePtr store_;
    const std::string handle_;  // none: it cannot be reconfigured
    std::set<int64_t> uuids_;
};

}  // namespace flow
