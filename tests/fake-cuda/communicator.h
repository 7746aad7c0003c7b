// A communicator of the fake NCCL: its state, and the jobs that its operations become.

#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "rendezvous.h"
#include "reduction.h"

enum Result {
    SUCCESS,
    UNHANDLED_CUDA_ERROR,
    SYSTEM_ERROR,
    INTERNAL_ERROR,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    REMOTE_ERROR,
    IN_PROGRESS,
};

enum Kind { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECV };

struct Operation {
    Kind kind;
    const void* from;
    void* to;
    size_t count;
    int type, reduction, peer;  // peer: the root or the peer
    int failure = 0;            // the error that its job is to end with, if any

    size_t bytes() const { return count * type_sizes[type]; }
};

// The fake driver's.
extern "C" {
int cuCtxGetCurrent(void** context);
int cuCtxSetCurrent(void* context);
int cuCtxGetDevice(int* device);
int cuMemAlloc_v2(unsigned long long* address, size_t bytes);
int cuMemFree_v2(unsigned long long address);
int flow_fake_enqueue(void* stream, void (*job)(void*), void* data);
}

class Communicator : public std::enable_shared_from_this<Communicator> {
public:
    Communicator(int ranks, int rank, int origin, int number, bool blocking, void* context)
        : rendezvous(ranks, rank), origin(origin), number(number), blocking(blocking), context(context) {}

    Rendezvous rendezvous;
    const int origin;  // the rank in the communicator that this one was split from, in the end
    const int number;  // in the order in which the process made them
    const bool blocking;
    void* const context;
    std::map<void*, std::pair<const char*, size_t>> registered;  // by handle; the registry's lock guards it
    std::uint64_t splits = 0;
    bool finalized = false;

    bool is_registered(const void* start, size_t bytes) const {
        auto address = static_cast<const char*>(start);
        for (auto& [_, range] : registered)
            if (address >= range.first && address + bytes <= range.first + range.second) return true;
        return false;
    }

    int state() {
        std::lock_guard lock(mutex);
        return current;
    }

    void fail(int code) {
        std::lock_guard lock(mutex);
        current = code;
        changed.notify_all();
    }

    /// Runs `work` in a thread while the state is "in progress"; a blocking communicator waits for
    /// it.
    int start(std::function<int()> work) {
        std::unique_lock lock(mutex);
        current = IN_PROGRESS;
        ++busy;
        std::thread([self = shared_from_this(), work = std::move(work)] {
            int result = work();
            std::lock_guard lock(self->mutex);
            if (self->current == IN_PROGRESS) self->current = result;
            --self->busy;
            self->changed.notify_all();
        }).detach();
        if (blocking) changed.wait(lock, [this] { return current != IN_PROGRESS; });
        return current;
    }

    auto stopping() {
        return [this] { return stopped.load(); };
    }

    /// Enqueues one job for all of `operations`. As with NCCL, a communicator that does not block
    /// prepares its first ones in the background, and they are not on the stream before its state
    /// is "success". One that does waits in the first collective until all ranks have called
    /// one.
    int launch(void* stream, std::vector<Operation> operations) {
        if (blocking) {
            for (const Operation& operation : operations) {
                const bool is_message = operation.kind == SEND || operation.kind == RECV;
                if (!is_message && operation.count && !rendezvous.connect(stopping())) return INTERNAL_ERROR;
            }
        }
        if (blocking || launched) return enqueue(stream, std::move(operations));
        launched = true;
        return start([this, stream, operations = std::move(operations)] {
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
            return enqueue(stream, operations);
        });
    }

    /// Waits for all jobs, unless the communicator is aborted first.
    int drain() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return stopped || finished == enqueued; });
        return SUCCESS;
    }

    /// Ends the waits of running jobs and threads, drops the other jobs, and returns when nothing
    /// runs any more.
    void abort() {
        stopped = true;
        rest();
    }

    /// Waits until no job and no thread runs.
    void rest() {
        std::unique_lock lock(mutex);
        changed.notify_all();
        changed.wait(lock, [this] { return busy == 0; });
    }

private:
    struct Task {
        std::shared_ptr<Communicator> communicator;
        std::uint64_t turn;
        std::vector<Operation> operations;
    };

    int enqueue(void* stream, std::vector<Operation> operations) {
        std::lock_guard lock(mutex);
        auto task = std::make_unique<Task>(Task{shared_from_this(), enqueued, std::move(operations)});
        void* before = nullptr;
        cuCtxGetCurrent(&before);
        cuCtxSetCurrent(context);
        int wrong = flow_fake_enqueue(stream, run, task.get());
        cuCtxSetCurrent(before);
        if (wrong) return UNHANDLED_CUDA_ERROR;
        task.release();
        ++enqueued;
        return SUCCESS;
    }

    /// The job. Those of one communicator run one after the other, on whatever streams they are.
    static void run(void* data) {
        std::unique_ptr<Task> task(static_cast<Task*>(data));
        Communicator& self = *task->communicator;
        std::unique_lock lock(self.mutex);
        self.changed.wait(lock, [&] { return self.stopped || self.finished == task->turn; });
        if (!self.stopped) {
            ++self.busy;
            lock.unlock();
            self.run_all(task->operations);
            lock.lock();
            --self.busy;
        }
        ++self.finished;
        self.changed.notify_all();
    }

    void run_all(const std::vector<Operation>& operations) {
        std::vector<Transfer> sent, received;
        for (const Operation& operation : operations) {
            if (operation.failure) {
                fail(operation.failure);
                std::unique_lock lock(mutex);
                return changed.wait(lock, [this] { return stopped.load(); });
            }
            if (operation.kind == SEND) {
                sent.push_back(transfer(operation.peer, operation.from, operation.bytes()));
            } else if (operation.kind == RECV) {
                received.push_back(transfer(operation.peer, operation.to, operation.bytes()));
            } else if (operation.count && !(gather_all() && collective(operation))) {
                return;
            }
        }
        exchange(std::move(sent), std::move(received));
    }

    static Transfer transfer(int peer, const void* data, size_t bytes) {
        return {peer, static_cast<char*>(const_cast<void*>(data)), bytes};
    }

    bool exchange(std::vector<Transfer> sent, std::vector<Transfer> received) {
        return rendezvous.exchange(stopping(), std::move(sent), std::move(received));
    }

    /// Returns when all ranks are here.
    bool gather_all() {
        char here = 1;
        std::vector<char> others(rendezvous.ranks);
        std::vector<Transfer> sent, received;
        for (int other = 0; other < rendezvous.ranks; ++other) {
            sent.push_back(transfer(other, &here, 1));
            received.push_back(transfer(other, &others[other], 1));
        }
        return exchange(std::move(sent), std::move(received));
    }

    /// The kernel of NCCL 2.28 for the mean of one rank leaves out the last elements: it gives each block an equal part,
    /// rounded down.
    static size_t written_of_one_rank(size_t count, size_t size) {
        const size_t blocks = std::min<size_t>(32, (count * size + (16 << 10) - 1) / (16 << 10));
        const size_t aligned = 16 / size;
        return std::min(count, blocks * ((count / blocks + aligned - 1) / aligned * aligned));
    }

    bool collective(const Operation& operation) {
        const int ranks = rendezvous.ranks, rank = rendezvous.rank, root = operation.peer;
        const size_t size = type_sizes[operation.type], bytes = operation.bytes();
        auto from = static_cast<const char*>(operation.from);
        auto to = static_cast<char*>(operation.to);
        std::vector<Transfer> sent, received;

        // Receives `count` elements from each rank, sends what `sent` says, and reduces what came.
        auto reduce_to = [&](char* out, size_t count) {
            std::vector<char> parts(count * size * ranks);
            for (int other = 0; other < ranks; ++other) received.push_back(transfer(other, parts.data() + other * count * size, count * size));
            if (!exchange(std::move(sent), std::move(received))) return false;
            if (ranks == 1 && operation.reduction == AVG) count = written_of_one_rank(count, size);
            reduce(DataType(operation.type), Reduction(operation.reduction), parts.data(), out, count, ranks);
            return true;
        };

        switch (operation.kind) {
            case ALL_REDUCE: {
                auto start = [&](int slice) { return operation.count * slice / ranks * size; };
                auto length = [&](int slice) { return start(slice + 1) - start(slice); };
                for (int other = 0; other < ranks; ++other) sent.push_back(transfer(other, from + start(other), length(other)));
                if (!reduce_to(to + start(rank), length(rank) / size)) return false;
                sent.clear();
                received.clear();
                for (int other = 0; other < ranks; ++other) {
                    if (other == rank) continue;
                    sent.push_back(transfer(other, to + start(rank), length(rank)));
                    received.push_back(transfer(other, to + start(other), length(other)));
                }
                return exchange(std::move(sent), std::move(received));
            }
            case REDUCE_SCATTER:
                for (int other = 0; other < ranks; ++other) sent.push_back(transfer(other, from + other * bytes, bytes));
                return reduce_to(to, operation.count);
            case REDUCE:
                sent.push_back(transfer(root, from, bytes));
                return rank == root ? reduce_to(to, operation.count) : exchange(std::move(sent), {});
            case BROADCAST:
                if (rank == root)
                    for (int other = 0; other < ranks; ++other) sent.push_back(transfer(other, from, bytes));
                return exchange(std::move(sent), {transfer(root, to, bytes)});
            case ALL_GATHER:
                for (int other = 0; other < ranks; ++other) {
                    sent.push_back(transfer(other, from, bytes));
                    received.push_back(transfer(other, to + other * bytes, bytes));
                }
                return exchange(std::move(sent), std::move(received));
            default: return false;
        }
    }

    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<bool> stopped{false};
    int current = SUCCESS;
    int busy = 0;  // running jobs and threads
    bool launched = false;
    std::uint64_t enqueued = 0, finished = 0;
};
