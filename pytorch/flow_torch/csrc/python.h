// The rules of Python's interpreter for C++ code that waits, and for threads that are not its own.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include <pthread.h>
#include <unistd.h>

#include <torch/csrc/utils/pybind.h>

namespace flow {

// The interval at which a thread that waits looks at signals.
constexpr std::chrono::milliseconds kSignalInterval(100);

// Runs the handlers of signals that have come, if this is the thread that Python runs them on. Whether one of them has raised an
// exception, KeyboardInterrupt say, which is then this thread's current one.
inline bool is_interrupted() {
    if (gettid() != getpid() || !Py_IsInitialized()) return false;
    const py::gil_scoped_acquire gil;
    return PyErr_CheckSignals() != 0;
}

// Throws the current exception of Python's, if there is one.
inline void rethrow_interrupt() {
    const py::gil_scoped_acquire gil;
    if (PyErr_Occurred()) throw py::error_already_set();
}

// A stay of a thread of ours where it may come to Python: to run a callback, or to drop a tensor.
//
// While Python ends, it ends each thread that comes to it by unwinding the thread's stack; where C++ code is on that, the process is
// aborted. So the end of the process waits for stays, and after that a stay does not begin: its thread sleeps for ever.
class PythonStay {
public:
    // None if it is too late.
    static std::shared_ptr<PythonStay> begin() {
        auto& own = state();
        std::lock_guard<std::mutex> lock(own.mutex);
        if (own.is_over && own.stays == 0) return nullptr;
        ++own.stays;
        return std::shared_ptr<PythonStay>(new PythonStay);
    }

    PythonStay(const PythonStay&) = delete;
    PythonStay& operator=(const PythonStay&) = delete;

    ~PythonStay() {
        auto& own = state();
        std::lock_guard<std::mutex> lock(own.mutex);
        if (--own.stays == 0) own.none_left.notify_all();
    }

    // Waits until there is none, at most for a minute. If it is the last wait, none begins afterwards.
    static void wait_for_all(bool is_last) {
        auto& own = state();
        const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
        std::unique_lock<std::mutex> lock(own.mutex);
        own.is_over = is_last;
        while (own.stays > 0 && std::chrono::steady_clock::now() < end) {
            own.none_left.wait_for(lock, kSignalInterval);
            lock.unlock();
            if (is_interrupted()) rethrow_interrupt();
            lock.lock();
        }
    }

    static bool is_over() {
        std::lock_guard<std::mutex> lock(state().mutex);
        return state().is_over;
    }

private:
    PythonStay() = default;

    struct State {
        std::mutex mutex;
        std::condition_variable none_left;
        size_t stays = 0;
        bool is_over = false;
    };

    // Threads may come to it as long as there is a process. A forked process has no threads, and so no stays.
    static State& state() {
        static State& made = *[] {
            auto* const own = new State;
            pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); },
                           [] {
                               state().stays = 0;
                               state().mutex.unlock();
                           });
            return own;
        }();
        return made;
    }
};

}  // namespace flow
