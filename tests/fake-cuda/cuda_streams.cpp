// Streams and events of the fake CUDA driver.

#include <climits>

#include "driver.h"

// Streams.

EXPORT int cuStreamCreateWithPriority(void** handle, unsigned flags, int) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    if (flags > 1) return INVALID_VALUE;
    auto stream = driver.start_stream(current);
    *handle = stream.get();
    driver.streams[stream.get()] = stream;
    return SUCCESS;
}

EXPORT int cuStreamCreate(void** handle, unsigned flags) { return cuStreamCreateWithPriority(handle, flags, 0); }

EXPORT int cuStreamDestroy_v2(void* handle) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    auto found = driver.streams.find(static_cast<Stream*>(handle));
    if (found == driver.streams.end()) return INVALID_HANDLE;
    found->second->close();
    driver.streams.erase(found);
    return SUCCESS;
}

ALSO(cuStreamDestroy, cuStreamDestroy_v2);

EXPORT int cuStreamWaitEvent(void* handle, void* event_handle, unsigned flags) {
    if (flags > 1) return INVALID_VALUE;
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    auto stream = find_stream(handle);
    auto event = find_event(event_handle);
    if (!stream || !event) return INVALID_HANDLE;
    if (event->mark && is_calling_thread(stream)) {
        const auto mark = event->mark;
        lock.unlock();
        mark->wait();
        return SUCCESS;
    }
    if (event->mark) stream->enqueue([mark = event->mark] { mark->wait(); });
    return SUCCESS;
}

EXPORT int cuStreamSynchronize(void* handle) { return submit(handle, {}, 0, true, [] {}); }

EXPORT int cuStreamQuery(void* handle) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    auto stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    return stream->idle() ? SUCCESS : NOT_READY;
}

/// For the other fakes: runs `job(data)` on a stream.
EXPORT int flow_fake_enqueue(void* handle, void (*job)(void*), void* data) {
    return submit(handle, {}, 0, false, [=] { job(data); });
}

// Events.

EXPORT int cuEventCreate(void** handle, unsigned flags) {
    constexpr unsigned disable_timing = 2;
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    auto event = std::make_shared<Event>(Event{current, !(flags & disable_timing), nullptr});
    *handle = event.get();
    driver.events[event.get()] = event;
    return SUCCESS;
}

EXPORT int cuEventDestroy_v2(void* handle) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    return driver.events.erase(static_cast<Event*>(handle)) ? SUCCESS : INVALID_HANDLE;
}

ALSO(cuEventDestroy, cuEventDestroy_v2);

/// How often an event was recorded in this process; the driver's mutex guards it.
long records = 0;

/// FLOW_FAKE_FAULT=<rank>:<count>: once so many events were recorded, the device of that rank has failed
/// for good, and will reach no other.
bool has_faulted() {
    static const long limit = [] {
        const char *text = std::getenv("FLOW_FAKE_FAULT"), *own = std::getenv("RANK");
        const char* colon = text ? std::strchr(text, ':') : nullptr;
        return colon && own && std::string(text, colon) == own ? std::atol(colon + 1) : LONG_MAX;
    }();
    return records >= limit;
}

EXPORT int cuEventRecord(void* handle, void* stream_handle) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    auto event = find_event(handle);
    auto stream = find_stream(stream_handle);
    if (!event || !stream || event->context != stream->context) return INVALID_HANDLE;
    ++records;
    event->mark = std::make_shared<Mark>();
    if (is_calling_thread(stream)) {
        event->mark->reach();
    } else {
        stream->enqueue([mark = event->mark] { mark->reach(); });
    }
    return SUCCESS;
}

EXPORT int cuEventQuery(void* handle) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    auto event = find_event(handle);
    if (!event) return INVALID_HANDLE;
    if (!event->mark || event->mark->is_reached()) return SUCCESS;
    return has_faulted() ? ILLEGAL_ADDRESS : NOT_READY;
}

EXPORT int cuEventSynchronize(void* handle) {
    std::shared_ptr<Mark> mark;
    {
        Lock lock(driver.mutex);
        if (Result wrong = check_context()) return wrong;
        auto event = find_event(handle);
        if (!event) return INVALID_HANDLE;
        mark = event->mark;
    }
    if (mark) note_wait("cuEventSynchronize"), mark->wait();
    return SUCCESS;
}

EXPORT int cuEventElapsedTime_v2(float* milliseconds, void* start_handle, void* end_handle) {
    Lock lock(driver.mutex);
    if (Result wrong = check_context()) return wrong;
    auto start = find_event(start_handle), end = find_event(end_handle);
    if (!start || !end || !start->timed || !end->timed || !start->mark || !end->mark) return INVALID_HANDLE;
    if (!start->mark->is_reached() || !end->mark->is_reached()) return NOT_READY;
    return *milliseconds = end->mark->milliseconds_since(*start->mark), SUCCESS;
}

ALSO(cuEventElapsedTime, cuEventElapsedTime_v2);
