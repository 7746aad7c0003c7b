// What a backward's reductions have taken.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace flow {

// One bucket in the last backward. Times are in seconds, from the backward's first gradient on.
struct BucketStats {
    // As communicated, on each rank.
    size_t bytes;
    std::shared_ptr<const std::vector<std::string>> parameters;
    // Bytes of gradients that were reduced where backward had put them.
    size_t in_place;
    // When its last gradient came.
    double ready_at;
    // For so long after that its reduction went on, until this rank saw that it was over.
    double ready_to_done;
    // The part of that during which backward still ran.
    double behind_backward;
};

// The last backward that reduced gradients in place. Times are in seconds.
struct Stats {
    // How many there have been.
    uint64_t backwards = 0;
    // In the order of reduction.
    std::vector<BucketStats> buckets;
    // From the first gradient to the last.
    double backward = 0;
    // For so long backward was held up at its end: it waited for other ranks, finished reductions and copied gradients back.
    double exposed = 0;
};

}  // namespace flow
