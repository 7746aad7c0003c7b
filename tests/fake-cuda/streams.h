// Streams and events of the fake CUDA driver: a stream is a thread that runs its jobs in order,
// an event is a mark in one.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

using Job = std::function<void()>;

struct Context;

/// Each job starts after a random pause of at most FLOW_FAKE_JITTER_US (200), so that a missing
/// wait shows.
inline void pause_at_random(std::minstd_rand& random) {
    static const long longest = [] {
        const char* text = std::getenv("FLOW_FAKE_JITTER_US");
        return text ? std::atol(text) : 200;
    }();
    if (longest <= 0) return;
    std::this_thread::sleep_for(std::chrono::microseconds(random() % (longest + 1)));
}

class Stream : public std::enable_shared_from_this<Stream> {
public:
    static std::shared_ptr<Stream> start(Context* context) {
        auto stream = std::make_shared<Stream>(context);
        std::thread([stream] { stream->run(); }).detach();
        return stream;
    }

    explicit Stream(Context* context) : context(context) {}

    void enqueue(Job job) {
        std::lock_guard lock(mutex);
        jobs.push_back(std::move(job));
        ++enqueued;
        changed.notify_all();
    }

    /// Waits for what has been enqueued so far.
    void synchronize() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this, all = enqueued] { return finished >= all; });
    }

    bool idle() {
        std::lock_guard lock(mutex);
        return finished == enqueued;
    }

    /// The thread ends after the last job.
    void close() {
        std::lock_guard lock(mutex);
        closed = true;
        changed.notify_all();
    }

    Context* const context;

private:
    void run() {
        std::minstd_rand random{std::random_device{}()};
        std::unique_lock lock(mutex);
        for (;;) {
            changed.wait(lock, [this] { return closed || !jobs.empty(); });
            if (jobs.empty()) return;
            Job job = std::move(jobs.front());
            jobs.pop_front();
            lock.unlock();
            pause_at_random(random);
            job();
            job = nullptr;
            lock.lock();
            ++finished;
            changed.notify_all();
        }
    }

    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Job> jobs;
    std::uint64_t enqueued = 0, finished = 0;
    bool closed = false;
};

/// One recording of an event. Those who wait keep the recording that they found, whatever is
/// recorded later.
class Mark {
public:
    void reach() {
        std::lock_guard lock(mutex);
        time = std::chrono::steady_clock::now();
        reached = true;
        changed.notify_all();
    }

    void wait() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return reached; });
    }

    bool is_reached() {
        std::lock_guard lock(mutex);
        return reached;
    }

    float milliseconds_since(Mark& earlier) { return std::chrono::duration<float, std::milli>(time - earlier.time).count(); }

private:
    std::mutex mutex;
    std::condition_variable changed;
    std::chrono::steady_clock::time_point time;
    bool reached = false;
};

struct Event {
    Context* context;
    bool timed;
    std::shared_ptr<Mark> mark;
};
