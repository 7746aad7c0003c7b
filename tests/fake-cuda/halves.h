// The two 16-bit floating point types, as values that turn into floats and are rounded (to nearest,
// ties to even) from them.

#pragma once

#include <cstdint>
#include <cstring>

template <class To, class From>
To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

struct BFloat {
    std::uint16_t code;

    BFloat() = default;

    BFloat(float value) {
        std::uint32_t all = bits<std::uint32_t>(value);
        code = value != value ? std::uint16_t(all >> 16 | 0x40) : std::uint16_t((all + 0x7fff + (all >> 16 & 1)) >> 16);
    }

    operator float() const { return bits<float>(std::uint32_t(code) << 16); }
};

struct Half {
    std::uint16_t code;

    Half() = default;

    Half(float value) {
        std::uint32_t all = bits<std::uint32_t>(value), sign = all >> 16 & 0x8000, size = all & 0x7fffffff;
        if (size > 0x7f800000) {
            code = std::uint16_t(sign | 0x7e00);
        } else if (size >= 0x477ff000) {  // rounds to 65536 or more
            code = std::uint16_t(sign | 0x7c00);
        } else if (size < 0x38800000) {  // below the least normal: a float whose last bit is worth 2^-24 does the rounding
            code = std::uint16_t(sign | (bits<std::uint32_t>(bits<float>(size) + 0.5f) - 0x3f000000));
        } else {
            code = std::uint16_t(sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13));
        }
    }

    operator float() const {
        std::uint32_t sign = std::uint32_t(code & 0x8000) << 16, size = code & 0x7fff;
        if (size >= 0x7c00) return bits<float>(sign | 0x7f800000 | (size & 0x3ff) << 13);
        if (size < 0x400) return bits<float>(sign | bits<std::uint32_t>(float(size) * 0x1p-24f));
        return bits<float>(sign | ((size << 13) + 0x38000000));
    }
};
