// The rules of Python's interpreter for C++ code that waits, and for threads that are not its own.
//
// This C++ part serves all versions of Python: it is compiled without Python's headers. What it takes of Python are the functions that are
// declared here, which each version has, and the operators that operators.py implements.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include <cxxabi.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

extern "C" {
int Py_IsInitialized(void);
int PyGILState_Check(void);
int PyGILState_Ensure(void);
void PyGILState_Release(int state);
void Py_IncRef(void* object);
void Py_DecRef(void* object);
int PyErr_CheckSignals(void);
void PyErr_WriteUnraisable(void* object);
void* PyUnicode_FromString(const char* text);
void* PyEval_SaveThread(void);
void PyEval_RestoreThread(void* thread);
}

namespace flow {

// Lets other threads have the interpreter, if this one has it.
class GilRelease {
public:
    GilRelease() : thread_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
    GilRelease(const GilRelease&) = delete;
    GilRelease& operator=(const GilRelease&) = delete;
    ~GilRelease() {
        if (thread_) PyEval_RestoreThread(thread_);
    }

private:
    void* const thread_;
};

// Has this thread have the interpreter.
class Gil {
public:
    Gil() : state_(PyGILState_Ensure()) {}
    Gil(const Gil&) = delete;
    Gil& operator=(const Gil&) = delete;
    ~Gil() { PyGILState_Release(state_); }

private:
    const int state_;
};

// What lies at `address` in an object of Python's, which is kept as long as this pointer.
template <typename Value>
std::shared_ptr<Value> keep(void* object, int64_t address) {
    const Gil gil;
    Py_IncRef(object);
    return {reinterpret_cast<Value*>(address), [object](Value*) {
                if (!Py_IsInitialized()) return;
                const Gil gil;
                Py_DecRef(object);
            }};
}

// Calls an operator that operators.py implements. Profilers do not see it, nor does a TorchDispatchMode.
template <typename Result, typename... Arguments>
Result call_python(const char* name, Arguments... arguments) {
    const at::DisableRecordFunctionGuard unrecorded;
    const c10::impl::ExcludeDispatchKeyGuard undispatched(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
    const auto found = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    return found.typed<Result(Arguments...)>().call(std::forward<Arguments>(arguments)...);
}

// The interval at which a thread that waits looks at signals.
constexpr std::chrono::milliseconds kSignalInterval(100);

inline bool is_main_thread() { return syscall(SYS_gettid) == getpid(); }

// What a signal's handler has raised, and nobody has been told yet. Only the main thread runs handlers.
inline std::exception_ptr& pending_interrupt() {
    static auto& made = *new std::exception_ptr;  // Python's: it is not freed after Python's end
    return made;
}

// As long as there is one, Python prints what a signal's handler raises on this thread, as it does for __del__, and goes on.
class PrintedInterrupts {
public:
    PrintedInterrupts() { ++count_; }
    PrintedInterrupts(const PrintedInterrupts&) = delete;
    PrintedInterrupts& operator=(const PrintedInterrupts&) = delete;
    ~PrintedInterrupts() {
        --count_;
        if (is_main_thread()) pending_interrupt() = nullptr;
    }

    static bool are_here() { return count_ > 0; }

private:
    static inline thread_local int count_ = 0;
};

// Runs the handlers of signals that have come, if this is the thread that Python runs them on. Whether one of them has raised an
// exception, KeyboardInterrupt say, which `rethrow_interrupt` throws.
inline bool is_interrupted() {
    if (!is_main_thread() || !Py_IsInitialized()) return false;
    auto& pending = pending_interrupt();
    if (pending) return true;
    if (PrintedInterrupts::are_here()) {
        const Gil gil;
        if (PyErr_CheckSignals() == 0) return false;
        void* const where = PyUnicode_FromString("the end of a process group");
        PyErr_WriteUnraisable(where);
        Py_DecRef(where);
        pending = std::make_exception_ptr(std::runtime_error("flow: interrupted"));
        return true;
    }
    try {
        call_python<void>("flow::check_signals");
    } catch (...) {
        pending = std::current_exception();
    }
    return pending != nullptr;
}

inline void rethrow_interrupt() {
    if (is_main_thread() && pending_interrupt()) std::rethrow_exception(std::exchange(pending_interrupt(), nullptr));
}

// Whether the exception that is being handled is Python's: what a signal's handler has raised.
inline bool is_handling_interrupt() {
    const auto* const type = abi::__cxa_current_exception_type();
    return type && std::strcmp(type->name(), "N8pybind1117error_already_setE") == 0;
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
