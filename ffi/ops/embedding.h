// The gradient of an embedding's table: arguments, launchers and declarations of all backends.
//
// dtable[v] is the sum of x[i] over all i with indices[i] = numbers[v]. x is the gradient of the
// looked-up rows. The numbers count up from numbers[0]: a table may be a shard of the rows of a
// larger one. An index elsewhere adds nothing. Sums are in the accumulation dtype, in an order that
// only the operands' shapes and indices give. Rows without an index are zeros.
#pragma once

#include <array>
#include <cstdint>

#include "common/signature.h"

namespace gradops {

struct EmbeddingBwdArgs {
  RowShape shape;           // of x
  ffi::DataType dtype;      // of x
  std::int64_t table_rows;  // v
  const void* x;            // [groups, rows, features]
  const void* indices;      // [groups, rows], int32
  Param numbers;            // [table_rows], int32
  ParamGrad dtable;         // [groups, table_rows, features], of any float dtype
  // Scratch of [groups, partial_rows, 1, features] in the accumulation dtype: only for CUDA.
  void* workspace;
  std::int64_t partial_rows;
};

ffi::Error EmbeddingBwd(CpuContext, const EmbeddingBwdArgs&);   // cpu/embedding.cc
ffi::Error EmbeddingBwd(CudaContext, const EmbeddingBwdArgs&);  // cuda/embedding/embedding.cu

struct EmbeddingBackward {
  static constexpr char kName[] = "embedding_bwd";
  using Args = EmbeddingBwdArgs;
  static constexpr BufferOf<Args> kOperands[] = {
      {"x", "nd", DtypeRule::kX, &Args::x},
      {"indices", "n", DtypeRule::kInt32, &Args::indices},
      {"numbers", "v", DtypeRule::kInt32, &Args::numbers},
  };
  static constexpr BufferOf<Args> kResults[] = {
      {"dtable", "vd", DtypeRule::kAnyFloat, &Args::dtable},
  };
  static constexpr std::array<AttributeOf<Args>, 0> kAttributes{};
  static constexpr std::array<Signature::Rule, 0> kRules{};
  static ffi::Error Launch(auto context, const Args& args) { return EmbeddingBwd(context, args); }
};

}  // namespace gradops
