// A fake of NCCL, for tests on machines without a GPU: its C interface, over shared memory
// between the processes of one machine and with the jobs on the streams of the fake driver
// (cuda.cpp). It shows what Flow asks of NCCL, and when. It is never a GPU result: it says nothing
// about speed, nor about what NCCL would do.
//
// As with NCCL, ranks that call different things wait for ever or exchange nonsense, and nobody
// notices a rank that was killed. Stricter than NCCL: a send ends only when all of it has been
// received, a group's operations of one communicator are on one stream, there are at most 64 ranks,
// and a communicator that blocks cannot be made within a group. journal.h says what tests may ask
// for.

#include <memory>
#include <string>
#include <utility>

#include "communicator.h"
#include "export.h"
#include "journal.h"

namespace {

struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;  // there is more, which is not looked at
};

using Pointer = std::shared_ptr<Communicator>;
using Lock = std::unique_lock<std::mutex>;

/// What the process holds; never destroyed, as streams may outlive `main`.
struct Library {
    std::mutex mutex;
    std::map<Communicator*, Pointer> communicators;
    std::map<std::uint64_t, int> files;  // of the meetings to which this process made the unique id
    int communicators_made = 0;
    std::string last_error;
};

struct Group {
    struct Part {
        Pointer communicator;
        void* stream;
        std::vector<Operation> operations;
    };
    int depth = 0, error = SUCCESS;
    std::vector<Part> parts;
};

Library& library = *new Library;
Journal& journal = *new Journal;
thread_local Group group;

int refuse(int code, std::string why) {
    Lock lock(library.mutex);
    library.last_error = std::move(why);
    return code;
}

Pointer find(Communicator* handle) {
    Lock lock(library.mutex);
    auto found = library.communicators.find(handle);
    return found == library.communicators.end() ? nullptr : found->second;
}

/// As NCCL, nothing may be asked of a communicator that is busy or has failed.
int check_ready(Communicator& communicator) {
    int state = communicator.state();
    if (state == SUCCESS) return SUCCESS;
    return refuse(state == IN_PROGRESS ? INVALID_ARGUMENT : state, "the communicator is not ready");
}

std::string text(const char* name, long long value) { return std::string(" ") + name + "=" + std::to_string(value); }

void log(const Communicator& communicator, const std::string& name, const std::string& arguments = "") {
    journal.write(journal.rank(communicator.origin), name + text("comm", communicator.number) + arguments);
}

/// Reads `config`, which may be null.
int read_blocking(const Config* config, bool otherwise, bool* blocking) {
    *blocking = otherwise;
    if (!config) return SUCCESS;
    if (config->magic != 0xcafebeef) return refuse(INVALID_ARGUMENT, "the configuration was not initialized");
    if (config->blocking == INT_MIN) return SUCCESS;
    if (config->blocking != 0 && config->blocking != 1) return refuse(INVALID_ARGUMENT, "blocking is neither 0 nor 1");
    *blocking = config->blocking;
    return SUCCESS;
}

const char* const operation_names[] = {"ncclAllReduce", "ncclReduce", "ncclBroadcast", "ncclAllGather", "ncclReduceScatter", "ncclSend", "ncclRecv"};

bool has_root(Kind kind) { return kind == REDUCE || kind == BROADCAST; }

bool has_reduction(Kind kind) { return kind == ALL_REDUCE || kind == REDUCE || kind == REDUCE_SCATTER; }

/// Whether all that this rank sends and receives is registered.
bool is_registered(const Communicator& communicator, const Operation& operation) {
    const Kind kind = operation.kind;
    const size_t bytes = operation.bytes(), ranks = communicator.rendezvous.ranks;
    const bool root = !has_root(kind) || communicator.rendezvous.rank == operation.peer;
    const bool sends = kind != RECV && (kind != BROADCAST || root), receives = kind != SEND && (kind != REDUCE || root);
    Lock lock(library.mutex);
    return (!sends || communicator.is_registered(operation.from, bytes * (kind == REDUCE_SCATTER ? ranks : 1))) &&
           (!receives || communicator.is_registered(operation.to, bytes * (kind == ALL_GATHER ? ranks : 1)));
}

void log(const Communicator& communicator, const Operation& operation) {
    std::string line = text("count", operation.count) + " type=" + type_names[operation.type];
    if (has_reduction(operation.kind)) line += std::string(" op=") + reduction_names[operation.reduction];
    if (has_root(operation.kind)) line += text("root", operation.peer);
    if (operation.kind == SEND || operation.kind == RECV) line += text("peer", operation.peer);
    line += text("group", group.depth > 0) + text("registered", is_registered(communicator, operation));
    log(communicator, operation_names[operation.kind], line);
}

int add_to_group(Pointer communicator, void* stream, const Operation& operation) {
    for (auto& part : group.parts) {
        if (part.communicator != communicator) continue;
        if (part.stream != stream) return refuse(INVALID_USAGE, "a group uses a communicator on two streams");
        part.operations.push_back(operation);
        return SUCCESS;
    }
    group.parts.push_back({std::move(communicator), stream, {operation}});
    return SUCCESS;
}

int try_to_call(const Pointer& communicator, Operation& operation, void* stream) {
    if (!communicator) return refuse(INVALID_ARGUMENT, "there is no such communicator");
    if (operation.type < 0 || operation.type >= DATA_TYPES) return refuse(INVALID_ARGUMENT, "there is no such data type");
    if (operation.reduction < 0 || operation.reduction >= REDUCTIONS) return refuse(INVALID_ARGUMENT, "there is no such reduction");
    if (operation.peer < 0 || operation.peer >= communicator->rendezvous.ranks) return refuse(INVALID_ARGUMENT, "there is no such rank");
    log(*communicator, operation);
    if (int wrong = check_ready(*communicator)) return wrong;
    auto failure = journal.count(journal.rank(communicator->origin));
    if (failure.now) {
        if (!communicator->blocking) communicator->fail(failure.now);
        return refuse(failure.now, "the test asked for this failure");
    }
    operation.failure = failure.later;
    if (group.depth > 0) return add_to_group(communicator, stream, operation);
    return communicator->launch(stream, {operation});
}

int call(Communicator* handle, void* stream, Operation operation) {
    int result = try_to_call(find(handle), operation, stream);
    if (group.depth > 0 && group.error == SUCCESS) group.error = result;
    return result;
}

/// Closes the rendezvous's file in the process that made it, and so in all: nobody can come any more.
void close_file(std::uint64_t number) {
    Lock lock(library.mutex);
    auto found = library.files.find(number);
    if (found == library.files.end()) return;
    close(found->second);
    library.files.erase(found);
}

void keep_file(const Address& address) {
    Lock lock(library.mutex);
    library.files[address.number] = address.file;
}

template <class Stopped>
int join(Rendezvous& rendezvous, const Address& address, Stopped stopped) {
    bool taken = false;
    int result = SUCCESS;
    if (!rendezvous.open(address))
        result = refuse(SYSTEM_ERROR, "the process that made the unique id is gone");
    else if (!rendezvous.join(stopped, &taken))
        result = taken ? refuse(INVALID_USAGE, "two processes have the same rank") : INTERNAL_ERROR;
    close_file(address.number);
    return result;
}

/// What a thread does for a split; the result is the parent's state.
int split(Communicator& parent, int color, int key, bool blocking, int number, Communicator** out) {
    constexpr int none = -1;
    auto stopping = parent.stopping();
    const std::uint64_t turn = ++parent.splits;
    if (!parent.rendezvous.choose(stopping, turn, color, key)) return INTERNAL_ERROR;
    if (color == none) return SUCCESS;
    std::vector<std::pair<int, int>> members;  // (key, rank in the parent)
    for (int rank = 0; rank < parent.rendezvous.ranks; ++rank) {
        auto& choice = parent.rendezvous.choice(rank, turn);
        if (choice.color == color) members.push_back({choice.key, rank});
    }
    std::sort(members.begin(), members.end());
    const int rank = int(std::find(members.begin(), members.end(), std::pair{key, parent.rendezvous.rank}) - members.begin());
    Address address;
    if (rank == 0) {
        if (!Rendezvous::create(&address)) return refuse(SYSTEM_ERROR, "no shared memory");
        keep_file(address);
        parent.rendezvous.publish_address(turn, address);
    } else if (!parent.rendezvous.wait_address(stopping, turn, members[0].second, &address)) {
        return INTERNAL_ERROR;
    }
    auto child = std::make_shared<Communicator>(int(members.size()), rank, parent.origin, number, blocking, parent.context);
    if (int wrong = join(child->rendezvous, address, stopping)) return wrong;
    Lock lock(library.mutex);
    library.communicators[child.get()] = child;
    __atomic_store_n(out, child.get(), __ATOMIC_RELEASE);
    return SUCCESS;
}

void forget(Communicator* communicator) {
    Lock lock(library.mutex);
    library.communicators.erase(communicator);
}

}  // namespace

EXPORT int ncclGetVersion(int* version) {
    const char* text = std::getenv("FLOW_FAKE_VERSION");
    return *version = text ? std::atoi(text) : 22809, SUCCESS;
}

EXPORT const char* ncclGetErrorString(int result) {
    static const char* const texts[] = {
        "no error",         "unhandled cuda error", "unhandled system error", "internal error",
        "invalid argument", "invalid usage",        "remote process exited or there was a network error",
        "NCCL operation in progress",
    };
    return result >= 0 && result <= IN_PROGRESS ? texts[result] : "unknown result code";
}

EXPORT const char* ncclGetLastError(Communicator*) {
    thread_local std::string copy;
    Lock lock(library.mutex);
    return (copy = library.last_error).c_str();
}

// Communicators.

EXPORT int ncclGetUniqueId(UniqueId* id) {
    static_assert(sizeof(Address) <= sizeof(UniqueId));
    journal.write(-1, "ncclGetUniqueId");
    Address address;
    if (!Rendezvous::create(&address)) return refuse(SYSTEM_ERROR, "no shared memory");
    keep_file(address);
    *id = {};
    std::memcpy(id->bytes, &address, sizeof address);
    return SUCCESS;
}

EXPORT int ncclCommInitRankConfig(Communicator** out, int ranks, UniqueId id, int rank, const Config* config) {
    if (!out || ranks < 1 || ranks > MOST_RANKS || rank < 0 || rank >= ranks) return refuse(INVALID_ARGUMENT, "there is no such rank");
    *out = nullptr;
    bool blocking = true;
    if (int wrong = read_blocking(config, true, &blocking)) return wrong;
    if (blocking && group.depth > 0) return refuse(INVALID_USAGE, "the fake cannot make a blocking communicator in a group");
    void* context = nullptr;
    int device = 0;
    if (cuCtxGetCurrent(&context) || cuCtxGetDevice(&device)) return refuse(UNHANDLED_CUDA_ERROR, "the thread has no CUDA context");
    Pointer communicator;
    {
        Lock lock(library.mutex);
        communicator = std::make_shared<Communicator>(ranks, rank, rank, library.communicators_made++, blocking, context);
        library.communicators[communicator.get()] = communicator;
    }
    log(*communicator, "ncclCommInitRankConfig", text("ranks", ranks) + text("rank", rank) + text("blocking", blocking));
    __atomic_store_n(out, communicator.get(), __ATOMIC_RELEASE);
    Address address;
    std::memcpy(&address, id.bytes, sizeof address);
    return communicator->start([self = communicator.get(), address] { return join(self->rendezvous, address, self->stopping()); });
}

EXPORT int ncclCommSplit(Communicator* handle, int color, int key, Communicator** out, const Config* config) {
    auto parent = find(handle);
    if (!parent || !out || color < -1) return refuse(INVALID_ARGUMENT, "there is no such communicator or color");
    if (int wrong = check_ready(*parent)) return wrong;
    bool blocking = true;
    if (int wrong = read_blocking(config, parent->blocking, &blocking)) return wrong;
    *out = nullptr;
    int number = -1;
    if (color >= 0) {
        Lock lock(library.mutex);
        number = library.communicators_made++;
    }
    log(*parent, "ncclCommSplit", text("color", color) + text("key", key) + text("new", number));
    return parent->start([=, self = parent.get()] { return split(*self, color, key, blocking, number, out); });
}

EXPORT int ncclCommFinalize(Communicator* handle) {
    auto communicator = find(handle);
    if (!communicator) return refuse(INVALID_ARGUMENT, "there is no such communicator");
    log(*communicator, "ncclCommFinalize");
    if (int wrong = check_ready(*communicator)) return wrong;
    if (std::exchange(communicator->finalized, true)) return refuse(INVALID_ARGUMENT, "the communicator was finalized before");
    return communicator->start([self = communicator.get()] { return self->drain(); });
}

EXPORT int ncclCommDestroy(Communicator* handle) {
    if (!handle) return SUCCESS;
    auto communicator = find(handle);
    if (!communicator) return refuse(INVALID_ARGUMENT, "there is no such communicator");
    log(*communicator, "ncclCommDestroy");
    communicator->drain();
    communicator->rest();
    forget(handle);
    return SUCCESS;
}

EXPORT int ncclCommAbort(Communicator* handle) {
    if (!handle) return SUCCESS;
    auto communicator = find(handle);
    if (!communicator) return refuse(INVALID_ARGUMENT, "there is no such communicator");
    log(*communicator, "ncclCommAbort");
    communicator->abort();
    forget(handle);
    return SUCCESS;
}

EXPORT int ncclCommGetAsyncError(Communicator* handle, int* error) {
    auto communicator = find(handle);
    if (!communicator || !error) return refuse(INVALID_ARGUMENT, "there is no such communicator");
    return *error = communicator->state(), SUCCESS;
}

EXPORT int ncclCommCount(Communicator* handle, int* count) {
    auto communicator = find(handle);
    if (!communicator) return refuse(INVALID_ARGUMENT, "there is no such communicator");
    if (int wrong = check_ready(*communicator)) return wrong;
    return *count = communicator->rendezvous.ranks, SUCCESS;
}

EXPORT int ncclCommUserRank(Communicator* handle, int* rank) {
    auto communicator = find(handle);
    if (!communicator) return refuse(INVALID_ARGUMENT, "there is no such communicator");
    if (int wrong = check_ready(*communicator)) return wrong;
    return *rank = communicator->rendezvous.rank, SUCCESS;
}

// Memory.

EXPORT int ncclMemAlloc(void** out, size_t bytes) {
    journal.write(-1, "ncclMemAlloc" + text("bytes", bytes));
    unsigned long long address = 0;
    if (cuMemAlloc_v2(&address, bytes)) return refuse(UNHANDLED_CUDA_ERROR, "the driver gives no memory");
    return *out = reinterpret_cast<void*>(address), SUCCESS;
}

EXPORT int ncclMemFree(void* address) {
    journal.write(-1, "ncclMemFree");
    if (cuMemFree_v2(reinterpret_cast<unsigned long long>(address))) return refuse(UNHANDLED_CUDA_ERROR, "the driver knows no such memory");
    return SUCCESS;
}

EXPORT int ncclCommRegister(Communicator* handle, void* start, size_t bytes, void** registration) {
    auto communicator = find(handle);
    if (!communicator || !start || !registration) return refuse(INVALID_ARGUMENT, "there is no such communicator or buffer");
    log(*communicator, "ncclCommRegister", text("bytes", bytes));
    if (int wrong = check_ready(*communicator)) return wrong;
    static std::uintptr_t last = 0;
    Lock lock(library.mutex);
    *registration = reinterpret_cast<void*>(++last);
    communicator->registered[*registration] = {static_cast<const char*>(start), bytes};
    return SUCCESS;
}

EXPORT int ncclCommDeregister(Communicator* handle, void* registration) {
    auto communicator = find(handle);
    if (!communicator) return refuse(INVALID_ARGUMENT, "there is no such communicator");
    log(*communicator, "ncclCommDeregister");
    Lock lock(library.mutex);
    if (communicator->registered.erase(registration)) return SUCCESS;
    library.last_error = "there is no such registration";
    return INVALID_ARGUMENT;
}

// Operations.

EXPORT int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, Communicator* communicator, void* stream) {
    return call(communicator, stream, {ALL_REDUCE, from, to, count, type, op, 0});
}

EXPORT int ncclReduce(const void* from, void* to, size_t count, int type, int op, int root, Communicator* communicator, void* stream) {
    return call(communicator, stream, {REDUCE, from, to, count, type, op, root});
}

EXPORT int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Communicator* communicator, void* stream) {
    return call(communicator, stream, {BROADCAST, from, to, count, type, SUM, root});
}

EXPORT int ncclAllGather(const void* from, void* to, size_t count, int type, Communicator* communicator, void* stream) {
    return call(communicator, stream, {ALL_GATHER, from, to, count, type, SUM, 0});
}

EXPORT int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, Communicator* communicator, void* stream) {
    return call(communicator, stream, {REDUCE_SCATTER, from, to, count, type, op, 0});
}

EXPORT int ncclSend(const void* from, size_t count, int type, int peer, Communicator* communicator, void* stream) {
    return call(communicator, stream, {SEND, from, nullptr, count, type, SUM, peer});
}

EXPORT int ncclRecv(void* to, size_t count, int type, int peer, Communicator* communicator, void* stream) {
    return call(communicator, stream, {RECV, nullptr, to, count, type, SUM, peer});
}

EXPORT int ncclGroupStart() {
    journal.write(-1, "ncclGroupStart");
    ++group.depth;
    return SUCCESS;
}

EXPORT int ncclGroupEnd() {
    journal.write(-1, "ncclGroupEnd");
    if (group.depth == 0) return refuse(INVALID_USAGE, "there is no group to end");
    if (--group.depth > 0) return SUCCESS;
    Group whole = std::exchange(group, {});
    if (whole.error) return whole.error;
    int result = SUCCESS;
    for (auto& part : whole.parts) {
        int one = part.communicator->launch(part.stream, std::move(part.operations));
        if (one && (result == SUCCESS || result == IN_PROGRESS)) result = one;
    }
    return result;
}
