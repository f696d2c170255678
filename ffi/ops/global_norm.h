// The sum of squares of many arrays, and the scaling of many arrays in place: arguments, launchers,
// checks and declarations shared by all backends.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "common/signature.h"

namespace gradops {

// The sum of squares of all leaves of one group. It is accumulated in double and stored as three
// numbers. Exactly one of them is not zero. For a sum of zero, all are zero. The reason: squares of
// float32 reach from 2^-298 to beyond 2^290. float32 does not cover this range, and float64 does
// not exist in JAX's default mode.
//   huge   = sum * 2^-192  where sum >= 2^96
//   normal = sum           where 2^-96 <= sum < 2^96, and where sum is NaN
//   tiny   = sum * 2^192   where sum < 2^-96
//
// Each of the three is additive: sums of parts (shards, batches of leaves) may be added component
// by component. A float64 result is always `normal`: no dtype has a wider range.
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

// One array. data is [groups, count] in `dtype`. So is `result`, if the op has a result.
struct Leaf {
  const void* data;
  std::int64_t count;
  ffi::DataType dtype;
  void* result = nullptr;
};

// The two factors of a group. Their product may leave the range of A. So an element is multiplied
// by one factor after the other.
template <typename A>
struct FactorPair {
  A first, second;

  GRADOPS_HOST_DEVICE bool Keeps() const { return first == 1 && second == 1; }
};

// Multiplies every element by its group's two factors. The product is computed in double if the
// element or the factors are double, else in float. It is rounded once, to the element's dtype. If
// both factors are 1, elements that are scaled in place are not written.
struct ScaleArgs {
  std::int64_t groups;
  std::vector<Leaf> leaves;              // leaves with elements; a result may be the leaf's memory
  ffi::DataType dtype;                   // of the factors: float32 or float64
  const void *factors, *second_factors;  // [groups]
};

struct SumOfSquaresArgs {
  std::int64_t groups;
  std::vector<Leaf> leaves;    // leaves with elements; without any, the results are 0
  ffi::DataType dtype;         // of the results: float32, or float64 if any leaf is float64
  void *huge, *normal, *tiny;  // [groups]
  // Scratch for partial sums. If there are leaves, it holds at least one double per group.
  void* workspace;
  std::int64_t workspace_doubles;
};

// More partial sums gain no speed, whether one group has them all or each of many groups has one.
// The workspace that jax_gradops/_ops/clip/kernels.py declares has room for this number.
inline constexpr std::int64_t kMaxPartialSums = 2048;

// Squares of 16-bit floats are exact in float32. For a float32 result, a few squares may be summed
// in float32 before they are added to a double. This is several times faster where the double unit
// is narrow. The sum of the few squares must lie in [kMinFloatSum, MaxFloatSum]. Then no square has
// left float32's range in a way that matters.
inline constexpr float kMinFloatSum = 0x1p-60f;
inline float MaxFloatSum(ffi::DataType result) {
  return result == ffi::F64 ? -1.0f : 0x1p100f;
}

ffi::Error SumOfSquares(CpuContext, const SumOfSquaresArgs&);   // cpu/global_norm.cc
ffi::Error SumOfSquares(CudaContext, const SumOfSquaresArgs&);  // cuda/clip/global_norm.cu

ffi::Error Scale(CpuContext, const ScaleArgs&);
ffi::Error Scale(CudaContext, const ScaleArgs&);

// Adds `buffer` to `leaves` if it has elements. The buffer must be [groups..., elements...].
// Returns what is wrong with the buffer, or "".
inline std::string AddLeaf(std::vector<Leaf>& leaves, std::int64_t groups,
                           ffi::Span<const std::int64_t> group_dims, const ffi::AnyBuffer& buffer,
                           void* result = nullptr) {
  if (!IsFloat(buffer.element_type())) return "must be float16, bfloat16, float32 or float64";
  const auto dims = buffer.dimensions();
  if (dims.size() < group_dims.size() ||
      !std::equal(group_dims.begin(), group_dims.end(), dims.begin())) {
    return "must start with the group axes";
  }
  const std::int64_t elements = Product(dims);
  if (elements > 0) {
    leaves.push_back({buffer.untyped_data(), elements / groups, buffer.element_type(), result});
  }
  return "";
}

struct SumOfSquaresOfTree {
  static constexpr char kName[] = "sum_of_squares";
  static Signature Declare() {
    using enum DtypeRule;
    using enum Presence;
    return {.name = kName,
            .operands = {{"leaves", "n", kAnyFloat, kRequired}},
            .results = {{"huge", "", kAccum, kRequired},
                        {"normal", "", kAccum, kRequired},
                        {"tiny", "", kAccum, kRequired}},
            .workspace = true,
            .variadic = true};
  }

  template <class Context>
  static auto Bind() {
    return gradops::Bind<Context>()
        .template Attr<std::int64_t>("group_rank")
        .RemainingArgs()                  // leaves
        .template Ret<ffi::AnyBuffer>()   // huge
        .template Ret<ffi::AnyBuffer>()   // normal
        .template Ret<ffi::AnyBuffer>()   // tiny
        .template Ret<ffi::AnyBuffer>();  // workspace
  }

  template <class Context>
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

    args.leaves.reserve(leaves.size());
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      const auto leaf = leaves.template get<ffi::AnyBuffer>(i);
      if (leaf.has_error()) return leaf.error();
      if (leaf->element_type() == ffi::F64) args.dtype = ffi::F64;
      const std::string mistake = AddLeaf(args.leaves, args.groups, group_dims, *leaf);
      if (!mistake.empty()) {
        return fail("leaf " + std::to_string(i) + " " + mistake + "; got " + Describe(*leaf) +
                    " with results " + Describe(*huge));
      }
    }

    for (const ffi::AnyBuffer* result : {&*huge, &*normal, &*tiny}) {
      const auto dims = result->dimensions();
      if (result->element_type() != args.dtype || dims.size() != group_dims.size() ||
          !std::equal(dims.begin(), dims.end(), group_dims.begin())) {
        return fail("results must all have one shape, and dtype " + Name(args.dtype) + "; got " +
                    Describe(*result) + " beside " + Describe(*huge));
      }
    }

    const std::int64_t scratch = Product(workspace->dimensions());
    if (workspace->element_type() != ScratchDtype(args.dtype) ||
        reinterpret_cast<std::uintptr_t>(args.workspace) % alignof(double) != 0) {
      return fail("workspace must have dtype " + Name(ScratchDtype(args.dtype)) +
                  " and the alignment of doubles, which it holds; got " + Describe(*workspace));
    }
    args.workspace_doubles = args.dtype == ffi::F64 ? scratch : scratch / 2;
    if (!args.leaves.empty() && args.workspace_doubles < args.groups) {
      return fail("workspace must hold at least one double per group; got " + Describe(*workspace));
    }
    return gradops::SumOfSquares(ctx, args);
  }
};

struct ScaleTree {
  static constexpr char kName[] = "scale";
  static Signature Declare() {
    using enum DtypeRule;
    using enum Presence;
    return {.name = kName,
            .operands = {{"leaves", "n", kAnyFloat, kRequired},
                         {"factor", "", kAccum, kRequired},
                         {"second_factor", "", kAccum, kRequired}},
            .results = {{"scaled", "n", kX, kRequired, /*in_place_of=*/"leaves"}},
            .variadic = true};
  }

  template <class Context>
  static auto Bind() {
    return gradops::Bind<Context>()
        .template Attr<std::int64_t>("group_rank")
        .RemainingArgs()   // leaves, factor, second_factor
        .RemainingRets();  // scaled
  }

  // The last two arguments are the factors.
  template <class Context>
  static ffi::Error Run(Context ctx, std::int64_t group_rank, ffi::RemainingArgs arguments,
                        ffi::RemainingRets results) {
    const auto fail = [](const std::string& what) {
      return ffi::Error::InvalidArgument("scale: " + what);
    };
    if (results.size() + 2 != arguments.size()) {
      return fail("must have a result for each leaf, and two factors after the leaves; got " +
                  std::to_string(arguments.size()) + " operands and " +
                  std::to_string(results.size()) + " results");
    }
    const auto factors = arguments.template get<ffi::AnyBuffer>(results.size());
    if (factors.has_error()) return factors.error();
    const auto second = arguments.template get<ffi::AnyBuffer>(results.size() + 1);
    if (second.has_error()) return second.error();
    const auto group_dims = factors->dimensions();
    const std::int64_t groups = Product(group_dims);
    if (group_rank < 0 || static_cast<std::size_t>(group_rank) != group_dims.size()) {
      return fail("attribute group_rank must be the rank of factor, got " +
                  std::to_string(group_rank) + " for " + Describe(*factors));
    }
    if (factors->element_type() != ffi::F32 && factors->element_type() != ffi::F64) {
      return fail("factor must be float32 or float64; got " + Describe(*factors));
    }
    const auto second_dims = second->dimensions();
    if (second->element_type() != factors->element_type() ||
        !std::equal(group_dims.begin(), group_dims.end(), second_dims.begin(), second_dims.end())) {
      return fail("second_factor must have factor's shape and dtype; got " + Describe(*second) +
                  " beside " + Describe(*factors));
    }
    ScaleArgs args{.groups = groups,
                   .leaves = {},
                   .dtype = factors->element_type(),
                   .factors = factors->untyped_data(),
                   .second_factors = second->untyped_data()};
    args.leaves.reserve(results.size());
    for (std::size_t i = 0; i < results.size(); ++i) {
      const auto leaf = arguments.template get<ffi::AnyBuffer>(i);
      if (leaf.has_error()) return leaf.error();
      auto result = results.template get<ffi::AnyBuffer>(i);
      if (result.has_error()) return result.error();
      const ffi::AnyBuffer& scaled = **result;
      std::string mistake = AddLeaf(args.leaves, groups, group_dims, *leaf, scaled.untyped_data());
      const auto dims = leaf->dimensions(), same = scaled.dimensions();
      if (mistake.empty() && (scaled.element_type() != leaf->element_type() ||
                              !std::equal(dims.begin(), dims.end(), same.begin(), same.end()))) {
        mistake = "must have its result's shape and dtype, which are " + Describe(scaled);
      }
      if (!mistake.empty()) {
        return fail("leaf " + std::to_string(i) + " " + mistake + "; got " + Describe(*leaf) +
                    " with factors " + Describe(*factors));
      }
    }
    return gradops::Scale(ctx, args);
  }
};

}  // namespace gradops
