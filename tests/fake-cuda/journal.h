// What the tests ask of the fake NCCL through the environment: a journal of the calls, and
// calls that fail.
//
// FLOW_FAKE_LOG=<prefix> each call is a line of <prefix>.<rank>
// FLOW_FAKE_FAIL=<rank>:<n>:<code> the rank's n-th operation (from 1, over all communicators)
// returns the code FLOW_FAKE_ASYNC_FAIL=<rank>:<n>:<code> its job fails instead
//
// The rank is RANK where that is set, else that in the communicator that was initialized, not
// split.

#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

class Journal {
public:
    /// The rank's name in the journal: RANK, else `otherwise`.
    int rank(int otherwise) {
        const char* text = std::getenv("RANK");
        return text && *text ? std::atoi(text) : otherwise;
    }

    /// Writes a line, at once and whole. Rank -1: that of the last line; no rank is known before
    /// the first communicator.
    void write(int rank, std::string line) {
        const char* prefix = std::getenv("FLOW_FAKE_LOG");
        std::lock_guard lock(mutex);
        if (rank < 0) rank = this->rank(last_rank);
        if (rank < 0) return;
        last_rank = rank;
        if (!prefix) return;
        int file = open((std::string(prefix) + "." + std::to_string(rank)).c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        if (file < 0) return;
        line += '\n';
        if (::write(file, line.data(), line.size()) < 0) std::perror("FLOW_FAKE_LOG");
        close(file);
    }

    struct Failure {
        int now, later;  // the codes with which the call, its job fails; or 0
    };

    /// Counts an operation of the rank.
    Failure count(int rank) {
        std::lock_guard lock(mutex);
        long n = ++counts[rank];
        return {asked("FLOW_FAKE_FAIL", rank, n), asked("FLOW_FAKE_ASYNC_FAIL", rank, n)};
    }

private:
    static int asked(const char* name, int rank, long n) {
        const char* text = std::getenv(name);
        int which = 0, code = 0;
        long nth = 0;
        bool hit = text && std::sscanf(text, "%d:%ld:%d", &which, &nth, &code) == 3 && which == rank && nth == n;
        return hit ? code : 0;
    }

    std::mutex mutex;
    int last_rank = -1;
    std::map<int, long> counts;
};
