// The kernels between tensors of type TENSORS and flat buffers of each type, each pair in a
// namespace; included by kernels.cpp.

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
#define PAIR_OF(tensors, flat) tensors##_and_##flat
#define PAIR(tensors, flat) PAIR_OF(tensors, flat)
#define REGISTER                                                                                      \
    const Registration packs("pack", TEXT(TENSORS), TEXT(FLAT), true, NAME(pack, TENSORS, FLAT));     \
    const Registration unpacks("unpack", TEXT(FLAT), TEXT(TENSORS), false, NAME(unpack, FLAT, TENSORS));

#define FLAT f32
namespace PAIR(TENSORS, FLAT) {
#include "../../kernels/src/cuda/pack.cu"
REGISTER
}
#undef FLAT

#define FLAT f64
namespace PAIR(TENSORS, FLAT) {
#include "../../kernels/src/cuda/pack.cu"
REGISTER
}
#undef FLAT

#define FLAT f16
namespace PAIR(TENSORS, FLAT) {
#include "../../kernels/src/cuda/pack.cu"
REGISTER
}
#undef FLAT

#define FLAT bf16
namespace PAIR(TENSORS, FLAT) {
#include "../../kernels/src/cuda/pack.cu"
REGISTER
}
#undef FLAT
