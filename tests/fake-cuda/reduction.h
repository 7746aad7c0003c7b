// NCCL's data types and reductions, on the CPU: in the order of the ranks, rounded to the type at
// each step.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "halves.h"

enum Reduction { SUM, PROD, MAX, MIN, AVG, REDUCTIONS };
enum DataType { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16, DATA_TYPES };

inline const char* const reduction_names[] = {"sum", "prod", "max", "min", "avg"};
inline const char* const type_names[] = {"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16"};
inline const std::size_t type_sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

/// What floats are computed in.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <Reduction op, class T>
T combine(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
        if (op == SUM || op == AVG) return T(std::uint64_t(a) + std::uint64_t(b));
        if (op == PROD) return T(std::uint64_t(a) * std::uint64_t(b));
        return op == MAX ? std::max(a, b) : std::min(a, b);
    } else {
        Wide<T> x = a, y = b;
        if (op == SUM || op == AVG) return T(x + y);
        if (op == PROD) return T(x * y);
        return op == MAX ? T(std::max(x, y)) : T(std::min(x, y));
    }
}

/// `out[i]` from the `ranks` values `in[rank * count + i]`. As in NCCL, an average multiplies
/// floats by 1/ranks first, and divides sums of integers last.
template <Reduction op, class T>
void reduce(const T* in, T* __restrict out, std::size_t count, int ranks) {
    auto value = [ranks](T one) {
        if constexpr (op == AVG && !std::is_integral_v<T>) return T(one * T(Wide<T>(1.0 / ranks)));
        return one;
    };
    for (std::size_t i = 0; i < count; ++i) out[i] = value(in[i]);
    for (int rank = 1; rank < ranks; ++rank) {
        const T* one = in + rank * count;
        for (std::size_t i = 0; i < count; ++i) out[i] = combine<op>(out[i], value(one[i]));
    }
    if constexpr (op == AVG && std::is_integral_v<T>)
        for (std::size_t i = 0; i < count; ++i) out[i] = T(out[i] / T(ranks));
}

template <class T>
void reduce(Reduction op, const T* in, T* out, std::size_t count, int ranks) {
    switch (op) {
        case SUM: return reduce<SUM>(in, out, count, ranks);
        case PROD: return reduce<PROD>(in, out, count, ranks);
        case MAX: return reduce<MAX>(in, out, count, ranks);
        case MIN: return reduce<MIN>(in, out, count, ranks);
        case AVG: return reduce<AVG>(in, out, count, ranks);
        case REDUCTIONS: return;
    }
}

inline void reduce(DataType type, Reduction op, const void* in, void* out, std::size_t count, int ranks) {
    auto run = [&](auto example) {
        using T = decltype(example);
        reduce(op, static_cast<const T*>(in), static_cast<T*>(out), count, ranks);
    };
    switch (type) {
        case I8: return run(std::int8_t{});
        case U8: return run(std::uint8_t{});
        case I32: return run(std::int32_t{});
        case U32: return run(std::uint32_t{});
        case I64: return run(std::int64_t{});
        case U64: return run(std::uint64_t{});
        case F16: return run(Half{});
        case F32: return run(float{});
        case F64: return run(double{});
        case BF16: return run(BFloat{});
        case DATA_TYPES: return;
    }
}
