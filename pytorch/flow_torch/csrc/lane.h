// Operations that keep their order, and who runs them.
//
// Whoever waits for an operation runs it, and those before it, on its own thread: with a core for each rank that is faster than to
// hand it to another thread. What nobody waits for in time a helper thread runs, so that it gets done in any case.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include <unistd.h>

#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "operation.h"

namespace flow {

class Lane final : public std::enable_shared_from_this<Lane> {
public:
    // `patience`: how long the helper leaves an operation to others.
    // `receives`: whether the operations are receives.
    static std::shared_ptr<Lane> make(Group group, std::chrono::microseconds patience, bool receives = false) {
        const auto lane = std::make_shared<Lane>(std::move(group), patience, receives);
        all().add(lane);
        return lane;
    }

    // At the end of the program, before Python's: does what destroy_process_group would have done, and waits for callbacks that run.
    // Whoever interrupts that has what is under way fail.
    static void end_all() {
        std::exception_ptr interrupt;
        // The second time what the callbacks have begun.
        for (const bool is_last : {false, true}) {
            try {
                all().end(is_last);
            } catch (...) {
                if (!is_handling_interrupt()) throw;
                interrupt = std::current_exception();
                all().fail(kInterrupted);
                all().end(is_last);
            }
        }
        if (interrupt) std::rethrow_exception(interrupt);
    }

    // Has the groups fail that have operations under way, and waits until these have ended.
    static void fail_all(const char* cause) {
        all().fail(cause);
        for (const auto& lane : all().lanes()) {
            while (!lane->is_forked() && !lane->is_idle()) {
                if (is_interrupted()) rethrow_interrupt();
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
        }
    }

    // Whether nothing is under way in this process.
    static bool are_all_idle() {
        const auto lanes = all().lanes();
        return std::all_of(lanes.begin(), lanes.end(), [](const auto& lane) { return lane->is_forked() || lane->is_idle(); });
    }

    // `make` calls this.
    Lane(Group group, std::chrono::microseconds patience, bool receives)
        : group_(std::move(group)), patience_(patience), receives_(receives) {}

    // Runs what there is; but what waits for messages, which may never come, fails, and a message that is being waited for is left to
    // its thread.
    void finish() {
        if (is_forked()) return;
        if (!receives_) return run_up_to(nullptr, kNoTimeout);
        std::deque<OperationPtr> dropped;
        {
            std::lock_guard<std::mutex> lock(queue_mutex_);
            dropped.swap(queue_);
        }
        for (const auto& operation : dropped) {
            // An orderly end calls no abort hooks.
            operation->end(std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, "flow: the group was destroyed before this message came")),
                           false);
            operation->announce();
        }
    }

    // Finishes, and ends the helper, before the last owner goes. In a forked process the helper is missing, and nobody may destroy what a
    // thread that is missing waits on.
    void close() {
        if (is_forked()) {
            new std::shared_ptr<Lane>(shared_from_this());
            return;
        }
        finish();
        bool is_waiting = false;
        {
            std::lock_guard<std::mutex> lock(queue_mutex_);
            closing_ = true;
            // Or is about to: another thread may just have begun a receive.
            is_waiting = receives_ && (is_running_ || !queue_.empty());
        }
        wakeup_.notify_all();
        // A callback may close the lane as well, at the end of the program say: one of them joins the helper.
        std::thread helper;
        {
            std::lock_guard<std::mutex> lock(queue_mutex_);
            helper.swap(helper_);
        }
        if (!helper.joinable()) return;
        // The helper may be what drops the group, or sleep for ever.
        if (is_waiting || PythonStay::is_over() || helper.get_id() == std::this_thread::get_id()) {
            helper.detach();
        } else {
            join(helper);
        }
    }

    // Runs the operation after those before it.
    void run(const OperationPtr& operation, Job job) {
        operation->job_ = std::move(job);
        if (is_forked()) {
            operation->run(group_);
            return operation->announce();
        }
        std::vector<OperationPtr> ended;
        {
            const auto running = lock_running(kNoTimeout);
            while (const auto first = take()) {
                run_taken(first);
                ended.push_back(first);
            }
            operation->run(group_);
        }
        ended.push_back(operation);
        for (const auto& each : ended) each->announce();
        Operation::rethrow_interrupt();
    }

    // Runs what is no operation, of which nobody has the work. False if something is to come before that, or may.
    template <typename Run>
    bool run_at_once(const Run& run) {
        if (is_forked()) return false;
        const std::unique_lock<std::timed_mutex> running(running_, std::try_to_lock);
        if (!running.owns_lock() || !is_empty()) return false;
        run(group_.get());
        return true;
    }

    // Runs the operation when somebody waits for it.
    void submit(const OperationPtr& operation, Job job) {
        operation->job_ = std::move(job);
        if (is_forked()) {
            operation->run(group_);
            return operation->announce();
        }
        operation->lane_ = shared_from_this();
        std::unique_lock<std::mutex> lock(queue_mutex_);
        // In order: not before one that could not be launched. And not while somebody waits for others in an operation: this thread
        // would wait, too.
        if (operation->job_.launch && not_launched_ == 0 && !is_running_) operation->launched_ = operation->job_.launch();
        if (!operation->launched_) ++not_launched_;
        queue_.push_back(operation);
        if (!helper_.joinable() && !closing_) helper_ = std::thread([self = shared_from_this()] { self->help(); });
        const bool wake = asleep_;
        lock.unlock();
        if (wake) wakeup_.notify_all();
    }

    // Runs all operations up to this one, which are to end in this time, or all there are.
    void run_up_to(Operation* last, Milliseconds timeout) {
        if (is_forked()) return;
        const bool is_limited = timeout > Milliseconds::zero();
        const auto end = Clock::now() + timeout;
        while (!last || !last->isCompleted()) {
            auto running = lock_running(timeout, end);
            const auto left = std::chrono::ceil<Milliseconds>(end - Clock::now());
            if (is_limited && left <= Milliseconds::zero() && !(last && last->isCompleted())) {
                give_up(timeout);
            }
            const auto first = take();
            if (!first) return;
            if (is_limited) {
                auto& own = first->job_.timeout;
                own = first.get() == last || own <= Milliseconds::zero() ? left : std::min(own, left);
            }
            run_taken(first);
            running.unlock();
            first->announce();
            Operation::rethrow_interrupt();
        }
    }

    // The futures of what was submitted must be completed: at the end of backward, if this is one, else at once.
    // Those of a backward are completed at its end, or when it waits for one, and in order, so that callbacks which communicate do
    // so in one order on all ranks. True if so.
    bool complete_futures() {
        const int task = torch::autograd::get_current_graph_task_id();
        std::unique_lock<std::mutex> lock(queue_mutex_);
        // At the end of backward callbacks may wait.
        if (is_completing_ || !is_in_backward()) {
            hurry_ = true;
            lock.unlock();
            wakeup_.notify_all();
            return false;
        }
        if (task != task_) {
            task_ = task;
            lock.unlock();
            in_backward_.push_back(weak_from_this());
            // The Reducer's own callback, which waits for the futures, comes later.
            torch::autograd::Engine::get_default_engine().queue_callback([lane = shared_from_this()] {
                lane->complete_deferred();
                lane->leave_backward();
            });
        }
        return true;
    }

    // Completes the futures that this thread's backward has left to its end: a hook is about to wait for one of them, or for one
    // that follows from them. A callback waits for operations that it has started, whose futures are not left to the end.
    static void complete_all_deferred() {
        if (is_completing_) return;
        for (const auto& lane : std::vector(in_backward_)) {
            if (const auto own = lane.lock()) own->complete_deferred();
        }
    }

    // Waits for a future, which may be an operation's or follow from one. Whoever is interrupted does not know of which group that is:
    // all that have operations under way fail.
    static void wait_for(const c10::intrusive_ptr<c10::ivalue::Future>& future) {
        struct Completion {
            std::mutex mutex;
            std::condition_variable come;
            bool is_complete = false;
        };
        const auto completion = std::make_shared<Completion>();
        future->addCallback([completion](c10::ivalue::Future&) {
            std::lock_guard<std::mutex> lock(completion->mutex);
            completion->is_complete = true;
            completion->come.notify_all();
        });
        // It is complete before its callbacks are called, of which another one may take its time.
        while (!future->completed()) {
            std::unique_lock<std::mutex> lock(completion->mutex);
            completion->come.wait_for(lock, kSignalInterval, [&] { return completion->is_complete; });
            lock.unlock();
            if (future->completed() || !is_interrupted()) continue;
            all().fail(kInterrupted);
            rethrow_interrupt();
        }
    }

    // Leaves the operation's future to the end of backward. Its mutex is held.
    void defer(const OperationPtr& operation) {
        std::lock_guard<std::mutex> lock(queue_mutex_);
        deferred_.push_back(operation);
    }

    bool is_idle() {
        std::lock_guard<std::mutex> lock(queue_mutex_);
        return queue_.empty() && !is_running_;
    }

    bool is_empty() {
        std::lock_guard<std::mutex> lock(queue_mutex_);
        return queue_.empty();
    }

    // In a forked process the locks are as some thread of the parent's had them, for ever. There an operation fails at once: the
    // group sees to that.
    bool is_forked() const { return forks_ != forks_before_; }

private:
    using Clock = std::chrono::steady_clock;
    static constexpr const char* kInterrupted = "it was interrupted while it waited";

    // All lanes of the process that are in use.
    class Registry {
    public:
        void add(const std::shared_ptr<Lane>& lane) {
            std::lock_guard<std::mutex> lock(mutex_);
            const auto is_gone = [](const auto& lane) { return lane.expired(); };
            lanes_.erase(std::remove_if(lanes_.begin(), lanes_.end(), is_gone), lanes_.end());
            lanes_.push_back(lane);
        }

        std::vector<std::shared_ptr<Lane>> lanes() {
            std::vector<std::shared_ptr<Lane>> found;
            std::lock_guard<std::mutex> lock(mutex_);
            for (const auto& each : lanes_) {
                if (const auto lane = each.lock()) found.push_back(lane);
            }
            return found;
        }

        // Receives fail after all others: callbacks that run may wait for theirs. The helpers stay until the last time, for what
        // callbacks begin.
        void end(bool is_last) {
            for (const bool receives : {false, true}) {
                for (const auto& lane : lanes()) {
                    if (lane->receives_ != receives) continue;
                    if (is_last) {
                        lane->close();
                    } else {
                        lane->finish();
                    }
                }
                PythonStay::wait_for_all(is_last && receives);
            }
        }

        // Has the groups fail that have operations under way.
        void fail(const char* cause) {
            for (const auto& lane : lanes()) {
                if (!lane->is_forked() && !lane->is_idle()) flow_abort(lane->group_.get(), cause);
            }
        }

        std::mutex& mutex() { return mutex_; }

    private:
        std::mutex mutex_;
        std::vector<std::weak_ptr<Lane>> lanes_;
    };

    static Registry& all() {
        static Registry& made = *[] {
            auto* const own = new Registry;
            // No other thread holds the lock while the process forks.
            pthread_atfork([] { all().mutex().lock(); }, [] { all().mutex().unlock(); },
                           [] {
                               ++forks_;
                               all().mutex().unlock();
                           });
            return own;
        }();
        return made;
    }

    // Whether a node of this thread's backward runs. Where a backward is within a node of another one, its callbacks are as well: the node
    // is not of theirs.
    static bool is_in_backward() {
        const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
        const auto node = torch::autograd::get_current_node();
        if (!nodes || !node) return false;
        // PyTorch lists no root: no node at all of a backward from a leaf.
        if (nodes->empty() || nodes->count(node.get()) > 0) return true;
        // Of a root it lists all nodes that follow, and no others: an outer node may have leaves in common with this backward.
        const auto& edges = node->next_edges();
        const auto is_listed = [&](const auto& edge) { return !edge.is_valid() || nodes->count(edge.function.get()) > 0; };
        const bool has_others = node->topological_nr() <= 1 && nodes->size() > edges.size();
        return !has_others && std::all_of(edges.begin(), edges.end(), is_listed);
    }

    // Waits for the helper, which may still run what another thread has begun meanwhile.
    void join(std::thread& helper) {
        std::unique_lock<std::mutex> lock(queue_mutex_);
        while (!wakeup_.wait_for(lock, kSignalInterval, [this] { return is_over_; })) {
            lock.unlock();
            if (is_interrupted()) {
                interrupt();
                helper.detach();
                rethrow_interrupt();
            }
            lock.lock();
        }
        lock.unlock();
        helper.join();
    }

    // Waits for the operation that runs, until `end` if there is a timeout.
    std::unique_lock<std::timed_mutex> lock_running(Milliseconds timeout, Clock::time_point end = {}) {
        std::unique_lock<std::timed_mutex> running(running_, std::try_to_lock);
        while (!running.owns_lock()) {
            const bool is_limited = timeout > Milliseconds::zero();
            if (is_limited && Clock::now() >= end) give_up(timeout);
            if (is_interrupted()) {
                interrupt();
                rethrow_interrupt();
            }
            const auto next = Clock::now() + kSignalInterval;
            // False if somebody else has it until then.
            static_cast<void>(running.try_lock_until(is_limited ? std::min(next, end) : next));
        }
        return running;
    }

    void interrupt() { flow_abort(group_.get(), kInterrupted); }

    // Ends what is under way as well: nothing can come after an operation that one rank does not wait for.
    [[noreturn]] void give_up(Milliseconds timeout) {
        const auto cause = c10::str("an operation, with those before it, has not ended in the ", timeout.count(), " ms of its wait()");
        flow_abort(group_.get(), cause.c_str());
        note(FLOW_ERROR_TIMEOUT);
        C10_THROW_ERROR(DistBackendError, "flow: " + cause);
    }

    // The first operation, off the queue, with `running_` held.
    OperationPtr take() {
        std::lock_guard<std::mutex> lock(queue_mutex_);
        if (queue_.empty()) return {};
        const auto first = queue_.front();
        queue_.pop_front();
        is_running_ = true;
        return first;
    }

    // With `running_` held.
    Job run_taken(const OperationPtr& first) { return end_taken(first, first->run_job(group_)); }

    Job end_taken(const OperationPtr& first, const std::exception_ptr& error, bool calls_hooks = true) {
        // Whoever waited for it may ask at once whether the lane is idle.
        {
            std::lock_guard<std::mutex> lock(queue_mutex_);
            is_running_ = false;
            if (!first->launched_) --not_launched_;
        }
        return first->end(error, calls_hooks);
    }

    // On the helper: runs all operations there are.
    void run_overdue() {
        while (true) {
            std::unique_lock<std::timed_mutex> running(running_);
            auto first = take();
            if (!first) return;
            const auto error = first->run_job(group_);
            // Before the operation ends: until then a callback that waits for it stays, and so the end of the process waits for this thread.
            auto stay = PythonStay::begin();
            auto done = end_taken(first, error, stay != nullptr);
            running.unlock();
            while (!stay) pause();
            done = Job{};
            complete_apart(std::move(first), std::move(stay));
        }
    }

    // On a thread of its own, as a callback may wait for what the helper is to run.
    static void complete_apart(OperationPtr operation, std::shared_ptr<PythonStay> stay) {
        auto future = operation->future_to_complete();
        if (!future) return operation.reset();  // while the stay lasts
        std::thread([operation = std::move(operation), future = std::move(future), stay = std::move(stay)]() mutable {
            operation->complete(future);
            future.reset();
            operation.reset();
            stay.reset();
        }).detach();
    }

    void complete_deferred() {
        is_completing_ = true;
        const auto over = c10::make_scope_exit([] { is_completing_ = false; });
        std::exception_ptr interrupt;
        try {
            run_up_to(nullptr, kNoTimeout);
        } catch (...) {
            if (!is_handling_interrupt()) throw;
            interrupt = std::current_exception();
            run_up_to(nullptr, kNoTimeout);  // the rest fails
        }
        while (const auto operation = take_deferred()) operation->complete(operation->future_);
        if (interrupt) std::rethrow_exception(interrupt);
    }

    OperationPtr take_deferred() {
        std::lock_guard<std::mutex> lock(queue_mutex_);
        if (deferred_.empty()) return {};
        const auto first = deferred_.front();
        deferred_.pop_front();
        return first;
    }

    // Lanes that are gone leave as well.
    void leave_backward() {
        const auto is_over = [this](const auto& lane) { return lane.expired() || lane.lock().get() == this; };
        in_backward_.erase(std::remove_if(in_backward_.begin(), in_backward_.end(), is_over), in_backward_.end());
    }

    // Looks again and again whether the first operation is still the same, so that it need not be woken for each; sleeps when there
    // was none for many looks.
    void help() {
        const int looks = patience_ < std::chrono::milliseconds(1) ? 0 : 50;
        std::unique_lock<std::mutex> lock(queue_mutex_);
        for (int idle = 0; !closing_; idle = queue_.empty() ? idle + 1 : 0) {
            if (queue_.empty() && idle >= looks) {
                asleep_ = true;
                wakeup_.wait(lock, [this] { return closing_ || !queue_.empty(); });
                asleep_ = false;
            }
            // No owner: the last one drops tensors, for which it may need the GIL, whose owner may wait for the lock.
            const Operation* const first = queue_.empty() ? nullptr : queue_.front().get();
            wakeup_.wait_for(lock, patience_, [this] { return closing_ || hurry_; });
            const bool is_overdue = !queue_.empty() && (hurry_ || queue_.front().get() == first);
            hurry_ = false;
            if (!is_overdue) continue;
            lock.unlock();
            run_overdue();
            lock.lock();
        }
        is_over_ = true;
        wakeup_.notify_all();
    }

    const Group group_;
    const std::chrono::microseconds patience_;
    const bool receives_;
    static inline std::atomic<unsigned> forks_{0};  // of this process's ancestors, and its own
    const unsigned forks_before_ = forks_;
    std::timed_mutex running_;  // locked before queue_mutex_
    std::mutex queue_mutex_;
    std::condition_variable wakeup_;
    std::deque<OperationPtr> queue_;
    std::deque<OperationPtr> deferred_;
    size_t not_launched_ = 0;
    int task_ = -1;
    bool is_running_ = false;
    // Whether this thread completes a future, in whatever lane.
    static inline thread_local bool is_completing_ = false;
    // The lanes with futures that are left to the end of this thread's backward.
    static inline thread_local std::vector<std::weak_ptr<Lane>> in_backward_;
    bool asleep_ = false;
    bool hurry_ = false;
    bool closing_ = false;
    // The helper has no more to do.
    bool is_over_ = false;
    std::thread helper_;
};

inline bool Operation::wait(Milliseconds timeout) {
    const auto start = std::chrono::steady_clock::now();
    if (lane_ && lane_->is_forked() && !ended_) {
        C10_THROW_ERROR(DistBackendError,
                        c10::str("flow: this process was forked from rank ", rank_, ", and only there the operation can be waited for"));
    }
    if (lane_) lane_->run_up_to(this, timeout);
    was_waited_for_ = true;
    auto left = timeout;
    if (timeout > Milliseconds::zero()) {
        const auto spent = std::chrono::duration_cast<Milliseconds>(std::chrono::steady_clock::now() - start);
        left = std::max(timeout - spent, Milliseconds(1));
    }
    const bool is_good = Work::wait(left);
    if (lane_ && lane_->is_forked()) return is_good;
    // Whoever runs the operation ends it a little before its future is complete.
    announce();
    std::unique_lock<std::mutex> lock(future_mutex_);
    const auto future = is_deferred_ ? nullptr : future_;
    lock.unlock();
    if (future && !future->completed()) Lane::wait_for(future);
    return is_good;
}

inline c10::intrusive_ptr<c10::ivalue::Future> Operation::getFuture() {
    std::unique_lock<std::mutex> lock(future_mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    is_deferred_ = lane_ && !lane_->is_forked() && !was_waited_for_ && lane_->complete_futures();
    if (is_deferred_) lane_->defer(OperationPtr::reclaim_copy(this));
    const bool is_done = (done_ || isCompleted()) && !is_deferred_;
    done_ |= is_done;
    lock.unlock();
    if (is_done) complete(future_);
    return future_;
}

}  // namespace flow
