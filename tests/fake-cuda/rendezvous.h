// Where the ranks of a communicator meet: shared memory with a channel of bytes from each rank to
// each, and transfers through them.
//
// The memory is a memfd of the process that made the unique id; the others open it through
// /proc/<pid>/fd while it is kept open, that is until all have come. So nothing is left behind,
// whoever is killed and whenever.

#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

constexpr int MOST_RANKS = 64;

struct UniqueId {
    char bytes[128];
};

/// What a unique id says.
struct Address {
    std::uint64_t number;
    pid_t pid;
    int file;
};

/// What a rank says in a split. There are two of each: a rank begins the next but one only after
/// all have done this one.
struct Choice {
    std::atomic<std::uint64_t> turn, address_turn;  // the split that the choice, the address are for
    std::atomic<int> color, key;
    Address address;  // of the new rendezvous, from its rank 0
};

struct Seat {
    std::atomic<std::uint32_t> present;
    std::atomic<std::uint32_t> bell;  // rung when something has changed for this rank
    std::atomic<bool> called;        // this rank has called a collective
    Choice choices[2];
};

struct Channel {
    alignas(64) std::atomic<std::uint64_t> written;
    alignas(64) std::atomic<std::uint64_t> read;
    alignas(64) char data[1 << 16];
};

struct Memory {
    std::uint64_t number;
    Seat seats[MOST_RANKS];
    Channel channels[];  // from rank a to rank b: a * ranks + b

    static size_t bytes(int ranks) { return sizeof(Memory) + sizeof(Channel) * ranks * ranks; }
};

struct Transfer {
    int peer;
    char* data;
    size_t bytes, done = 0;
    std::uint64_t end = 0;  // of a sent transfer's bytes in its channel, once all are written
};

class Rendezvous {
public:
    /// Makes the memory; the caller closes `address.file` when all have come.
    static bool create(Address* address) {
        int file = memfd_create("flow-nccl-fake", MFD_CLOEXEC);
        std::random_device random;
        *address = {std::uint64_t(random()) << 32 | random(), getpid(), file};
        if (file < 0) return false;
        if (ftruncate(file, off_t(Memory::bytes(MOST_RANKS))) == 0 && pwrite(file, &address->number, 8, 0) == 8) return true;
        close(file);
        return false;
    }

    Rendezvous(int ranks, int rank) : ranks(ranks), rank(rank) {}
    Rendezvous(const Rendezvous&) = delete;

    ~Rendezvous() {
        if (memory) munmap(memory, Memory::bytes(ranks));
    }

    /// Maps the memory; false if its maker is gone.
    bool open(const Address& address) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/fd/%d", int(address.pid), address.file);
        int file = ::open(path, O_RDWR | O_CLOEXEC);
        if (file < 0) return false;
        std::uint64_t number = 0;
        if (pread(file, &number, 8, 0) == 8 && number == address.number) {
            void* mapped = mmap(nullptr, Memory::bytes(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
            if (mapped != MAP_FAILED) memory = static_cast<Memory*>(mapped);
        }
        close(file);
        return memory;
    }

    /// Takes the seat and waits for all others; false if it is taken, or `stopped`.
    template <class Stopped>
    bool join(Stopped stopped, bool* taken) {
        *taken = memory->seats[rank].present.exchange(1);
        if (*taken) return false;
        ring_all();
        return wait(stopped, [this] {
            for (int other = 0; other < ranks; ++other)
                if (!memory->seats[other].present) return false;
            return true;
        });
    }

    /// Sends and receives all, in order between each two ranks, until the peers have taken what was
    /// sent; false if `stopped`.
    template <class Stopped>
    bool exchange(Stopped stopped, std::vector<Transfer> sent, std::vector<Transfer> received) {
        return wait(stopped, [&] {
            bool done = true;
            std::array<bool, MOST_RANKS> sending{}, receiving{};
            for (Transfer& one : sent) {
                if (sending[one.peer] || !send(one)) sending[one.peer] |= one.done < one.bytes, done = false;
            }
            for (Transfer& one : received) {
                if (receiving[one.peer] || !receive(one)) receiving[one.peer] = true, done = false;
            }
            return done;
        });
    }

    /// Returns when all ranks have called a collective; false if `stopped`.
    template <class Stopped>
    bool connect(Stopped stopped) {
        if (memory->seats[rank].called.exchange(true)) return true;
        ring_all();
        return wait(stopped, [this] {
            for (int other = 0; other < ranks; ++other)
                if (!memory->seats[other].called) return false;
            return true;
        });
    }

    /// Begins a split: publishes this rank's choice and waits for all. `turn`: 1, 2, ...
    template <class Stopped>
    bool choose(Stopped stopped, std::uint64_t turn, int color, int key) {
        Choice& mine = choice(rank, turn);
        mine.color = color;
        mine.key = key;
        mine.turn = turn;
        ring_all();
        return wait(stopped, [&] {
            for (int other = 0; other < ranks; ++other)
                if (choice(other, turn).turn < turn) return false;
            return true;
        });
    }

    Choice& choice(int of, std::uint64_t turn) { return memory->seats[of].choices[turn % 2]; }

    void publish_address(std::uint64_t turn, const Address& address) {
        choice(rank, turn).address = address;
        choice(rank, turn).address_turn = turn;
        ring_all();
    }

    template <class Stopped>
    bool wait_address(Stopped stopped, std::uint64_t turn, int of, Address* address) {
        if (!wait(stopped, [&] { return choice(of, turn).address_turn >= turn; })) return false;
        *address = choice(of, turn).address;
        return true;
    }

    const int ranks, rank;

private:
    Channel& channel(int from, int to) { return memory->channels[from * ranks + to]; }

    void ring(int whose) {
        auto& bell = memory->seats[whose].bell;
        ++bell;
        syscall(SYS_futex, &bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }

    void ring_all() {
        for (int other = 0; other < ranks; ++other) ring(other);
    }

    /// Tries until it is `done`, each time that the bell has rung; looks every 5 ms whether it is
    /// `stopped`.
    template <class Stopped, class Done>
    bool wait(Stopped stopped, Done done) {
        auto& bell = memory->seats[rank].bell;
        for (;;) {
            std::uint32_t before = bell;
            if (stopped()) return false;
            if (done()) return true;
            timespec limit{0, 5'000'000};
            syscall(SYS_futex, &bell, FUTEX_WAIT, before, &limit, nullptr, 0);
        }
    }

    /// Writes what there is room for; whether the peer has taken all.
    bool send(Transfer& one) {
        if (one.bytes == 0) return true;
        Channel& to = channel(rank, one.peer);
        std::uint64_t written = to.written, read = to.read;
        if (one.done < one.bytes) {
            size_t now = std::min(one.bytes - one.done, sizeof to.data - size_t(written - read));
            if (now == 0) return false;
            around(written, now, [&](char* there, size_t from, size_t bytes) { std::memcpy(there, one.data + one.done + from, bytes); }, to);
            one.done += now;
            to.written = one.end = written + now;
            ring(one.peer);
        }
        return one.done == one.bytes && to.read >= one.end;
    }

    /// Reads what there is; whether that was the rest.
    bool receive(Transfer& one) {
        if (one.done == one.bytes) return true;
        Channel& from = channel(one.peer, rank);
        std::uint64_t written = from.written, read = from.read;
        size_t now = std::min(one.bytes - one.done, size_t(written - read));
        if (now == 0) return false;
        around(read, now, [&](char* there, size_t to, size_t bytes) { std::memcpy(one.data + one.done + to, there, bytes); }, from);
        one.done += now;
        from.read = read + now;
        ring(one.peer);
        return one.done == one.bytes;
    }

    /// Calls `copy` for the one or two pieces of `bytes` bytes from `position` on in the channel's
    /// ring.
    template <class Copy>
    static void around(std::uint64_t position, size_t bytes, Copy copy, Channel& channel) {
        size_t start = position % sizeof channel.data, first = std::min(bytes, sizeof channel.data - start);
        copy(channel.data + start, 0, first);
        if (first < bytes) copy(channel.data, first, bytes - first);
    }

    Memory* memory = nullptr;
};
