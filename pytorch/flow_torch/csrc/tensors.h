// Tensors as flow_comm.h's functions get them.
#pragma once

#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <flow_comm.h>

namespace flow {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using RedOp = c10d::ReduceOp::RedOpType;

inline std::optional<flow_dtype> code_of(at::ScalarType type) {
    switch (type) {
        case at::kFloat: return FLOW_F32;
        case at::kDouble: return FLOW_F64;
        case at::kHalf: return FLOW_F16;
        case at::kBFloat16: return FLOW_BF16;
        case at::kInt: return FLOW_I32;
        case at::kLong: return FLOW_I64;
        case at::kByte: return FLOW_U8;
        default: return std::nullopt;
    }
}

inline const char* name_of(RedOp op) {
    using Op = c10d::ReduceOp;
    switch (op) {
        case Op::SUM: return "sum";
        case Op::AVG: return "avg";
        case Op::PRODUCT: return "prod";
        case Op::MIN: return "min";
        case Op::MAX: return "max";
        case Op::BAND: return "band";
        case Op::BOR: return "bor";
        case Op::BXOR: return "bxor";
        default: return "own";
    }
}

// The reduction of this name.
inline RedOp reduction_of(std::string_view name) {
    using Op = c10d::ReduceOp;
    for (const auto op : {Op::SUM, Op::AVG, Op::PRODUCT, Op::MIN, Op::MAX, Op::BAND, Op::BOR, Op::BXOR}) {
        if (name == name_of(op)) return op;
    }
    TORCH_CHECK_VALUE(false, "flow: a reduction is one of sum, avg, prod, min, max, band, bor, bxor, not ", name);
}

// The type as which flow-comm can reduce this one, if there is any. c10d's codes of these reductions are flow-comm's.
inline std::optional<flow_dtype> reducible(at::ScalarType type, RedOp op) {
    using Op = c10d::ReduceOp;
    static_assert(int(Op::SUM) == FLOW_SUM && int(Op::AVG) == FLOW_AVG && int(Op::PRODUCT) == FLOW_PRODUCT);
    static_assert(int(Op::MIN) == FLOW_MIN && int(Op::MAX) == FLOW_MAX);
    if (op > Op::MAX) return std::nullopt;
    // Of bytes with and without sign the bits of sums and products are the same.
    if (type == at::kChar && (op == Op::SUM || op == Op::PRODUCT)) return FLOW_U8;
    return code_of(type);
}

// The label that ranks must agree on, and errors name, where elements move as bytes or as parts: their type, and the reduction if there is
// one. Empty if flow-comm knows both.
inline std::string label(at::ScalarType type, std::optional<RedOp> op) {
    const auto code = op ? reducible(type, *op) : code_of(type);
    if (code && code == code_of(type)) return "";
    // The longest, with a reduction, has as many bytes as a label may have.
    std::string name(c10::getDtypeNames(type).first);
    for (const auto* const family : {"float8_", "float4_"}) {
        if (name.rfind(family, 0) == 0) name.erase(0, std::strlen(family));
    }
    return op ? name + ", " + name_of(*op) : name;
}

// The elements of a contiguous tensor. What flow-comm has no type for moves as bytes.
inline flow_buffer elements(const Tensor& tensor) {
    const auto code = code_of(tensor.scalar_type());
    const size_t count = code ? tensor.numel() : tensor.nbytes();
    return {tensor.data_ptr(), count, code.value_or(FLOW_U8)};
}

inline flow_buffer elements(const Tensor& tensor, flow_dtype code) {
    return {tensor.data_ptr(), static_cast<size_t>(tensor.numel()), code};
}

inline const Tensor& dense(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_cpu() && tensor.layout() == at::kStrided, "flow: only dense CPU tensors can be communicated here, not ",
                tensor.layout(), " ones on ", tensor.device());
    return tensor;
}

inline const Tensor& only(const Tensors& tensors) {
    TORCH_CHECK(tensors.size() == 1, "flow: one tensor is expected, not ", tensors.size());
    return tensors[0];
}

inline const Tensors& only(const std::vector<Tensors>& lists) {
    TORCH_CHECK(lists.size() == 1, "flow: one list of tensors is expected, not ", lists.size());
    return lists[0];
}

// A tensor of every rank of a group, all of one type.
inline const Tensors& of_ranks(const Tensors& tensors, int size) {
    TORCH_CHECK(tensors.size() == static_cast<size_t>(size), "flow: a tensor for each of ", size, " ranks is expected, not ",
                tensors.size());
    for (const auto& tensor : tensors) {
        TORCH_CHECK_TYPE(dense(tensor).scalar_type() == tensors[0].scalar_type(), "flow: the tensors must have one type");
    }
    return tensors;
}

// Checks that blocks have the type and the number of elements of this rank's.
inline void alike(const Tensors& blocks, const Tensor& own) {
    for (const auto& block : blocks) {
        TORCH_CHECK_TYPE(block.scalar_type() == own.scalar_type(), "flow: inputs and outputs must have one type, not ",
                         block.scalar_type(), " and ", own.scalar_type());
        TORCH_CHECK_VALUE(block.numel() == own.numel(), "flow: inputs and outputs must have as many elements, not ", block.numel(),
                          " and ", own.numel());
    }
}

// Lets `write` fill a tensor: where it is, or by way of a contiguous copy.
template <typename Write>
void fill(const Tensor& tensor, const Write& write) {
    const auto own = tensor.contiguous();
    write(own);
    if (!own.is_same(tensor)) tensor.copy_(own);
}

// `count` blocks of as many elements as the tensor has, one after the other.
inline Tensor blocks(const Tensor& tensor, int64_t count) {
    return at::empty({count, tensor.numel()}, tensor.options().memory_format(at::MemoryFormat::Contiguous));
}

// The elements of all tensors, one after the other.
inline Tensor joined(const Tensors& tensors) {
    Tensors flat;
    for (const auto& tensor : tensors) flat.push_back(tensor.reshape(-1));
    return at::cat(flat);
}

// Room for them.
inline Tensor room_for(const Tensors& tensors) {
    int64_t total = 0;
    for (const auto& tensor : tensors) total += tensor.numel();
    return at::empty({total}, tensors[0].options().memory_format(at::MemoryFormat::Contiguous));
}

// Copies them to their tensors.
inline void divide(const Tensor& joined, const Tensors& tensors) {
    int64_t start = 0;
    for (const auto& tensor : tensors) {
        tensor.copy_(joined.narrow(0, start, tensor.numel()).view(tensor.sizes()));
        start += tensor.numel();
    }
}

// Returns how many elements each rank has, as flow-comm counts them.
inline std::vector<size_t> counts(const Tensors& tensors) {
    std::vector<size_t> counts;
    for (const auto& tensor : tensors) counts.push_back(code_of(tensor.scalar_type()) ? tensor.numel() : tensor.nbytes());
    return counts;
}

inline Tensor combine(RedOp op, const Tensor& left, const Tensor& right) {
    using Op = c10d::ReduceOp;
    const bool is_bool = left.scalar_type() == at::kBool;
    switch (op) {
        case Op::SUM: return is_bool ? left.logical_or(right) : left + right;
        case Op::PRODUCT: return is_bool ? left.logical_and(right) : left * right;
        case Op::MIN: return at::minimum(left, right);
        case Op::MAX: return at::maximum(left, right);
        case Op::BAND: return left.bitwise_and(right);
        case Op::BOR: return left.bitwise_or(right);
        case Op::BXOR: return left.bitwise_xor(right);
        default: TORCH_CHECK(false, "flow: this reduction is not supported for ", left.scalar_type());
    }
}

// Reduces the rows of a matrix, in their order, into one tensor: for types and reductions that flow-comm does not know.
inline void reduce_rows(RedOp op, const Tensor& rows, const Tensor& result) {
    auto sum = rows[0];
    for (int64_t row = 1; row < rows.size(0); ++row) sum = combine(op, sum, rows[row]);
    result.copy_(sum.view(result.sizes()));
}

inline void check_bitwise(RedOp op, at::ScalarType type) {
    const bool is_bitwise = op == c10d::ReduceOp::BAND || op == c10d::ReduceOp::BOR || op == c10d::ReduceOp::BXOR;
    TORCH_CHECK(!is_bitwise || c10::isIntegralType(type, /*includeBool=*/true), "flow: only integers have bitwise reductions, not ", type);
}

}  // namespace flow
