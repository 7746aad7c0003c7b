// Gathers many tensors into one flat buffer (pack) and spreads it again (unpack), changing the type
// on the way.
//
// Compiled once for each pair of types: -DTENSORS=f32 -DFLAT=bf16 gives pack_f32_bf16 and
// unpack_bf16_f32.
//
// Includes nothing, since NVRTC has no headers. It is also C++17 for the host, for tests without a
// GPU: there whoever includes it defines, before it,
//   - TENSORS and FLAT, each f32, f64, f16 or bf16; __global__, __device__ and __grid_constant__ as
//     nothing, and __forceinline__ as inline;
//   - objects blockIdx, threadIdx and blockDim (thread-local where several host threads run
//     blocks), each with an unsigned member x. Every thread of every block is one call; blocks may
//     have any number of threads.

typedef float f32;
typedef double f64;

struct f16 {
    unsigned short bits;
};

struct bf16 {
    unsigned short bits;
};

struct Chunk {
    unsigned long long flat_start;    // in elements, as all of these
    unsigned long long tensor_start;
    unsigned int length;
    unsigned int tensor;
};

struct Tensors {
    void* address[480];
};

// What a type is multiplied in.
template <typename T> struct Arithmetic { typedef float type; };
template <> struct Arithmetic<f64> { typedef double type; };

#ifdef __CUDACC_RTC__
__device__ __forceinline__ unsigned int bits_of(float value) { return __float_as_uint(value); }
__device__ __forceinline__ float float_of(unsigned int bits) { return __uint_as_float(bits); }
__device__ __forceinline__ float widen(f16 value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
}
__device__ __forceinline__ f16 to_f16(float value) {
    f16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}
#else
template <typename To, typename From> To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "other sizes");
    To to;
    __builtin_memcpy(&to, &from, sizeof(to));
    return to;
}
inline unsigned int bits_of(float value) { return same_bits<unsigned int>(value); }
inline float float_of(unsigned int bits) { return same_bits<float>(bits); }
inline float widen(f16 value) { return float(same_bits<_Float16>(value)); }
inline f16 to_f16(float value) { return same_bits<f16>(_Float16(value)); }
#endif

__device__ __forceinline__ float widen(f32 value) { return value; }
__device__ __forceinline__ double widen(f64 value) { return value; }
__device__ __forceinline__ float widen(bf16 value) { return float_of((unsigned int)value.bits << 16); }

// All round to nearest, ties to even. A double becomes a half by way of float.
__device__ __forceinline__ void narrow(f64 value, f64* to) { *to = value; }
__device__ __forceinline__ void narrow(f64 value, f32* to) { *to = (f32)value; }
__device__ __forceinline__ void narrow(f32 value, f64* to) { *to = value; }
__device__ __forceinline__ void narrow(f32 value, f32* to) { *to = value; }
__device__ __forceinline__ void narrow(f32 value, f16* to) { *to = to_f16(value); }
__device__ __forceinline__ void narrow(f64 value, f16* to) { *to = to_f16((f32)value); }
__device__ __forceinline__ void narrow(f32 value, bf16* to) {
    unsigned int bits = bits_of(value);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to->bits = nan ? bits >> 16 | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
__device__ __forceinline__ void narrow(f64 value, bf16* to) { narrow((f32)value, to); }

// What becomes of an element on its way.
template <typename Scale> struct Scaled {
    Scale scale;
    template <typename From, typename To> __device__ __forceinline__ void operator()(From from, To* to) const {
        narrow(widen(from) * scale, to);
    }
};

struct Cast {
    template <typename From, typename To> __device__ __forceinline__ void operator()(From from, To* to) const {
        narrow(widen(from), to);
    }
    template <typename T> __device__ __forceinline__ void operator()(T from, T* to) const { *to = from; }
};

template <typename T, unsigned int N> struct alignas(sizeof(T) * N) Vector {
    T element[N];
};

// Moves elements begin to end in vectors of N, to which both pointers must be aligned. Each thread
// has several loads on their way before it stores the first: from and to may be the same memory, so
// the compiler could not do that itself.
template <unsigned int N, typename From, typename To, typename Element>
__device__ __forceinline__ void move_vectors(const From* from, To* to, unsigned int begin, unsigned int end, Element element) {
    const unsigned int LOADS = 4;
    const Vector<From, N>* source = (const Vector<From, N>*)(from + begin);
    Vector<To, N>* destination = (Vector<To, N>*)(to + begin);
    const unsigned int vectors = (end - begin) / N;
    for (unsigned int first = threadIdx.x; first < vectors; first += LOADS * blockDim.x) {
        Vector<From, N> loaded[LOADS];
#pragma unroll
        for (unsigned int i = 0; i < LOADS; i++) {
            if (first + i * blockDim.x < vectors) loaded[i] = source[first + i * blockDim.x];
        }
#pragma unroll
        for (unsigned int i = 0; i < LOADS; i++) {
            if (first + i * blockDim.x < vectors) {
                Vector<To, N> result;
#pragma unroll
                for (unsigned int k = 0; k < N; k++) element(loaded[i].element[k], &result.element[k]);
                destination[first + i * blockDim.x] = result;
            }
        }
    }
}

// Moves a chunk in vectors of 16 bytes of the wider type, as far as it goes; the rest, and what is
// not aligned, by element.
template <typename From, typename To, typename Element>
__device__ __forceinline__ void move_chunk(const From* from, To* to, unsigned int length, Element element) {
    const unsigned int N = 16 / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
    const bool aligned = (unsigned long long)from % (N * sizeof(From)) == 0 && (unsigned long long)to % (N * sizeof(To)) == 0;
    const unsigned int vectorized = aligned ? length - length % N : 0;
    move_vectors<N>(from, to, 0, vectorized, element);
    move_vectors<1>(from, to, vectorized, length, element);
}

#define NAME_OF(operation, from, to) operation##_##from##_##to
#define NAME(operation, from, to) NAME_OF(operation, from, to)

// Block b moves chunks[b].
extern "C" __global__ void NAME(pack, TENSORS, FLAT)(
    const Chunk* chunks, const __grid_constant__ Tensors tensors, FLAT* flat, Arithmetic<TENSORS>::type scale) {
    const Chunk chunk = chunks[blockIdx.x];
    const TENSORS* tensor = (const TENSORS*)tensors.address[chunk.tensor] + chunk.tensor_start;
    const Scaled<Arithmetic<TENSORS>::type> scaled = {scale};
    move_chunk(tensor, flat + chunk.flat_start, chunk.length, scaled);
}

extern "C" __global__ void NAME(unpack, FLAT, TENSORS)(
    const Chunk* chunks, const __grid_constant__ Tensors tensors, const FLAT* flat) {
    const Chunk chunk = chunks[blockIdx.x];
    TENSORS* tensor = (TENSORS*)tensors.address[chunk.tensor] + chunk.tensor_start;
    move_chunk(flat + chunk.flat_start, tensor, chunk.length, Cast());
}
