// An operation, its work and its future.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/version.h>

#include "group.h"
#include "hooks.h"
#include "profile.h"

// PyTorch has no feature macro for them.
#define FLOW_HAS_COMPLETION_HOOKS (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15)

namespace flow {

class Lane;

// The work of an operation, done once.
struct Job {
    std::function<void(const flow_group*)> run;
    // The operation's own; see `within`.
    Milliseconds timeout = c10d::kUnsetTimeout;
    // See `label`.
    std::string elements;
    // The group with another name of the operation, if flow-comm calls it something else.
    Group renamed = nullptr;
    // If there is one: announces the operation to other ranks, before it is run, without waiting. False if that is not possible
    // now.
    std::function<bool()> launch = nullptr;
};

class Operation final : public c10d::Work {
public:
    // `hooks`: none if it is a part of another operation.
    Operation(int rank, c10d::OpType type, const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> results,
              std::shared_ptr<const Hooks> hooks)
        : Work(rank, type, title(type), recorded(inputs)), results_(std::move(results)), hooks_(std::move(hooks)) {
        ++Seen::operations;
    }

    bool wait(Milliseconds timeout) override;
    std::vector<at::Tensor> result() override { return results_; }
    int sourceRank() const override { return source_; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

#if FLOW_HAS_COMPLETION_HOOKS
    uint64_t getCompletionKey() const override { return key_; }
#endif

    void set_source(int rank) { source_ = rank; }

private:
    friend class Lane;

    // Does what there is to do. Returns its error.
    std::exception_ptr run_job(const Group& group);
    // With this error, or none. Who waits goes on. Returns what was done: to drop its tensors takes Python. Hooks may be Python's.
    Job end(const std::exception_ptr& error, bool calls_hooks = true);
    Job run(const Group& group) { return end(run_job(group)); }
    // Throws what a signal's handler has raised while this thread ran an operation. That is not the operation's error: callbacks get that,
    // and whoever waits, perhaps on other threads.
    static void rethrow_interrupt() {
        if (interrupt_) std::rethrow_exception(std::exchange(interrupt_, nullptr));
    }
    // Completes the future that is to be completed now. This runs its callbacks, which may communicate: no lock is held.
    void announce();
    // The future that the first caller is to complete now that the operation is done, if somebody has asked for it, and it is not left to
    // the end of backward. One that is asked for later is complete at once.
    c10::intrusive_ptr<c10::ivalue::Future> future_to_complete();
    void complete(const c10::intrusive_ptr<c10::ivalue::Future>& future);

    static inline std::atomic<uint64_t> keys_{0};

    const std::vector<at::Tensor> results_;
    const std::shared_ptr<const Hooks> hooks_;
    const uint64_t key_ = keys_++;
    std::atomic<int> source_{-1};
    Job job_;
    bool launched_ = false;
    std::shared_ptr<Lane> lane_;
    std::atomic<bool> ended_{false};
    // Then its future is completed at once, also in backward.
    std::atomic<bool> was_waited_for_{false};
    std::mutex future_mutex_;
    // Both under the mutex: of the threads that run the operation, wait for it, and ask for the future exactly one completes it.
    bool done_ = false;
    bool is_deferred_ = false;
    c10::intrusive_ptr<c10::ivalue::Future> future_;
    static inline thread_local std::exception_ptr interrupt_;
};

using OperationPtr = c10::intrusive_ptr<Operation>;

inline std::exception_ptr Operation::run_job(const Group& group) {
    try {
        at::NoGradGuard no_grad;
        const auto patient = within(job_.renamed ? job_.renamed : group, job_.timeout);
        job_.run(job_.elements.empty() ? patient.get() : with_label(patient, operation_name(retrieveOpType()), job_.elements).get());
    } catch (...) {
        if (!is_handling_interrupt()) return std::current_exception();
        interrupt_ = std::current_exception();
        return std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, flow_error_message()));
    }
    return nullptr;
}

inline Job Operation::end(const std::exception_ptr& error, bool calls_hooks) {
    auto done = std::exchange(job_, Job{});
    calls_hooks &= hooks_ != nullptr;
    if (error && calls_hooks) hooks_->failed.call();
    finish(error);
    ended_ = true;
    if (!error && calls_hooks) hooks_->completed.call(key_);
    return done;
}

inline c10::intrusive_ptr<c10::ivalue::Future> Operation::future_to_complete() {
    std::lock_guard<std::mutex> lock(future_mutex_);
    return std::exchange(done_, true) || is_deferred_ ? nullptr : future_;
}

inline void Operation::announce() {
    if (const auto future = future_to_complete()) complete(future);
}

inline void Operation::complete(const c10::intrusive_ptr<c10::ivalue::Future>& future) {
    if (const auto error = exception()) {
        future->setError(error);
    } else {
        future->markCompleted(c10::IValue(results_));
    }
}

}  // namespace flow
