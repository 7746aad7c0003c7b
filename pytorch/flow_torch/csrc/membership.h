// What a backend has of one group: reconfigure() gives it another one.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "lane.h"
#include "memory.h"

namespace flow {

// The time that a helper leaves a collective, and a message, to whoever waits for it. Two ranks that send to each other first both need
// their helpers.
constexpr std::chrono::milliseconds kPatience(20);
constexpr std::chrono::microseconds kPatienceForMessages(50);

// The other rank of messages, and the tag of what comes from there.
using Peer = std::pair<int, int>;
constexpr int kAnyRank = -1;
constexpr int kToRank = -1;

class Membership {
public:
    explicit Membership(Group of)
        : group(std::move(of)),
          collectives(Lane::make(group, kPatience)),
          all_gather(with_label(group, "all_gather", "")),
          reduce_scatter(with_label(group, "reduce_scatter", "")),
          all_to_all(with_label(group, "all_to_all", "")) {}

    const Group group;
    const std::shared_ptr<Lane> collectives;
    // The group for operations that flow-comm calls something else.
    const Group all_gather, reduce_scatter, all_to_all;
    Staging staging;  // of the operations in `collectives`
    std::atomic<uint64_t> sequence{0};

    // Runs what there is to run, and ends receives.
    void close() {
        collectives->close();
        std::unique_lock<std::mutex> lock(messages_mutex_, std::defer_lock);
        if (!collectives->is_forked()) lock.lock();
        for (const auto& [_, lane] : messages_) lane->close();
    }

    // Whether no operation is under way.
    bool is_idle() {
        if (!collectives->is_idle()) return false;
        std::lock_guard<std::mutex> lock(messages_mutex_);
        return std::all_of(messages_.begin(), messages_.end(), [](const auto& each) { return each.second->is_idle(); });
    }

    void submit_message(Peer peer, bool is_receive, const OperationPtr& operation, Job job) {
        std::lock_guard<std::mutex> lock(messages_mutex_);
        if (!messages_.count(peer)) close_idle_lanes();
        auto& lane = messages_[peer];
        if (!lane) lane = Lane::make(group, kPatienceForMessages, is_receive);
        lane->submit(operation, std::move(job));
    }

    // Another group of the same ranks, which all make in the same order.
    Group duplicate(Milliseconds timeout) {
        std::vector<size_t> ranks(flow_world_size(group.get()));
        std::iota(ranks.begin(), ranks.end(), 0);
        return make(ranks, c10::str("duplicate ", duplicates_++), timeout);
    }

    // A group of some of the ranks, which only they make: several of the same ranks in one order.
    Group new_group_of(const std::vector<size_t>& ranks, Milliseconds timeout) {
        std::unique_lock<std::mutex> lock(groups_mutex_);
        const auto key = c10::str(c10::Join(",", ranks), "#", groups_[ranks]++);
        lock.unlock();
        return make(ranks, key, timeout);
    }

private:
    // Closes idle lanes of messages with tags: programs may use any number of these, each for a short time.
    void close_idle_lanes() {
        for (auto lane = messages_.begin(); lane != messages_.end();) {
            const bool is_over = lane->first.second > 0 && lane->second->is_idle();
            if (is_over) lane->second->close();
            lane = is_over ? messages_.erase(lane) : std::next(lane);
        }
    }

    Group make(const std::vector<size_t>& ranks, const std::string& key, Milliseconds timeout) const {
        ++Seen::operations;
        flow_group* made = nullptr;
        check(flow_new_group_of(within(group, timeout).get(), ranks.data(), ranks.size(), key.c_str(), &made));
        return own(made);
    }

    std::atomic<uint64_t> duplicates_{0};
    std::mutex messages_mutex_;
    std::map<Peer, std::shared_ptr<Lane>> messages_;
    std::mutex groups_mutex_;
    std::map<std::vector<size_t>, size_t> groups_;  // how many of these ranks were made
};

}  // namespace flow
