// Sum of squares over many arrays: arguments, launchers, checks and bindings shared by all backends.
#pragma once

#include <string>
#include <vector>

#include "common/handler.h"
#include "common/shape.h"

namespace gradops {

// The sum of squares of all leaves of one group, accumulated in double and stored as three numbers
// of which exactly one is not zero (all are zero for a sum of zero). Squares of float32 reach from
// 2^-298 to beyond 2^290; float32 alone does not, and float64 does not exist in JAX's default mode.
//   huge   = sum * 2^-192  where sum >= 2^96
//   normal = sum           where 2^-96 <= sum < 2^96, and where sum is NaN
//   tiny   = sum * 2^192   where sum < 2^-96
// Each is additive, so sums of parts (of shards, of batches of leaves) may be added component-wise.
// In float64 results everything is `normal`: double's range is what there is.
template <typename A>
struct RangedSum {
  A huge, normal, tiny;
};

template <typename A>
GRADOPS_HOST_DEVICE inline RangedSum<A> Split(double sum) {
  if constexpr (std::is_same_v<A, float>) {
    if (sum >= 0x1p96) return {static_cast<float>(sum * 0x1p-192), 0, 0};
    if (sum < 0x1p-96) return {0, 0, static_cast<float>(sum * 0x1p192)};
  }
  return {0, static_cast<A>(sum), 0};
}

// One array: leaf.data is [groups, count] of `dtype`.
struct Leaf {
  const void* data;
  std::int64_t count;
  ffi::DataType dtype;
};

struct SumOfSquaresArgs {
  std::int64_t groups;
  std::vector<Leaf> leaves;  // those with elements
  ffi::DataType dtype;       // of the results: float32, or float64 if any leaf is
  void *huge, *normal, *tiny;  // [groups]
  // Scratch of workspace_doubles doubles: [groups, workspace_doubles / groups].
  void* workspace;
  std::int64_t workspace_doubles;
};

ffi::Error SumOfSquares(CpuContext, const SumOfSquaresArgs&);   // cpu/global_norm.cc
ffi::Error SumOfSquares(CudaContext, const SumOfSquaresArgs&);  // cuda/global_norm.cu

template <class Context>
struct GlobalNorm {
  static ffi::Error Run(Context ctx, std::int64_t group_rank, ffi::RemainingArgs leaves, Out huge,
                        Out normal, Out tiny, Out workspace) {
    const auto fail = [](const std::string& what) {
      return ffi::Error::InvalidArgument("sum_of_squares: " + what);
    };
    const auto group_dims = huge->dimensions();
    if (group_rank < 0 || static_cast<std::size_t>(group_rank) != group_dims.size()) {
      return fail("attribute group_rank must be the rank of the results, got " +
                  std::to_string(group_rank) + " for " + Describe(*huge));
    }
    SumOfSquaresArgs args{.groups = Product(group_dims),
                          .leaves = {},
                          .dtype = ffi::F32,
                          .huge = huge->untyped_data(),
                          .normal = normal->untyped_data(),
                          .tiny = tiny->untyped_data(),
                          .workspace = workspace->untyped_data(),
                          .workspace_doubles = 0};
    if (args.groups < 0) return fail("too many groups: " + Describe(*huge));
    args.leaves.reserve(leaves.size());
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      const auto decoded = leaves.template get<ffi::AnyBuffer>(i);
      if (decoded.has_error()) return decoded.error();
      const ffi::AnyBuffer& leaf = *decoded;
      const auto dims = leaf.dimensions();
      const std::string name = "leaf " + std::to_string(i);
      if (!IsFloat(leaf.element_type())) {
        return fail(name + " must be float16, bfloat16, float32 or float64; got " + Describe(leaf));
      }
      bool grouped = dims.size() >= group_dims.size();
      for (std::size_t k = 0; grouped && k < group_dims.size(); ++k) {
        grouped = dims[k] == group_dims[k];
      }
      if (!grouped) {
        return fail(name + " must start with the axes of the results " + Describe(*huge) + "; got " +
                    Describe(leaf));
      }
      const std::int64_t elements = Product(dims);
      if (elements < 0) return fail(name + " has a negative dimension or too many elements: " + Describe(leaf));
      if (elements > 0 && leaf.untyped_data() == nullptr) return fail(name + " has no data");
      if (leaf.element_type() == ffi::F64) args.dtype = ffi::F64;
      if (elements > 0) {
        args.leaves.push_back({leaf.untyped_data(), elements / args.groups, leaf.element_type()});
      }
    }
    for (const ffi::AnyBuffer* result : {&*huge, &*normal, &*tiny}) {
      const auto dims = result->dimensions();
      bool matches = dims.size() == group_dims.size() && result->element_type() == args.dtype;
      for (std::size_t k = 0; matches && k < dims.size(); ++k) matches = dims[k] == group_dims[k];
      if (!matches) return fail("results must all be alike, in " + Name(args.dtype) + "; got " + Describe(*result));
    }
    const std::int64_t bytes = Product(workspace->dimensions()) * ByteWidthOf(workspace->element_type());
    if (bytes < 0 || (bytes > 0 && workspace->untyped_data() == nullptr)) return fail("workspace has no data");
    args.workspace_doubles = bytes / 8;
    if (args.groups > 0 && !args.leaves.empty() && args.workspace_doubles < args.groups) {
      return fail("workspace must hold at least one double per group; got " + Describe(*workspace));
    }
    return SumOfSquares(ctx, args);
  }
  static auto Bind() {
    return gradops::Bind<Context>()
        .template Attr<std::int64_t>("group_rank")
        .RemainingArgs()                  // leaves
        .template Ret<ffi::AnyBuffer>()   // huge
        .template Ret<ffi::AnyBuffer>()   // normal
        .template Ret<ffi::AnyBuffer>()   // tiny
        .template Ret<ffi::AnyBuffer>();  // workspace
  }
};

}  // namespace gradops
