// Layer norm and RMS norm forward, CUDA. Row layout: cuda/row_norm/policy.h.
//
// In one kernel, a block loads one row into registers (forward.cuh). In another kernel,
// blocks take rows one after the other, and copy the next rows to shared memory in advance
// (forward_rows.cuh). Each warp makes two passes over its part of a row. Then the warps'
// means and sums of squares are merged (moments.cuh). Traffic: x is read, y written.
// With a residual, x and residual are read, sum and y written.
//
// Unaligned rows may start at any element. They too are accessed by 16-byte vectors, and only their
// first and last few elements need special care (Place). Narrow unaligned rows are copied in chunks
// of neighbouring rows (forward_narrow.cuh).
#include "cuda/row_norm/forward.cuh"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda/row_norm/forward_narrow.cuh"
#include "cuda/row_norm/forward_rows.cuh"
#include "cuda/row_norm/launch.cuh"
#include "cuda/row_norm/stream.cuh"

namespace gradops {

RowOverride& ForcedRowPlan() {
  static RowOverride forced{};
  return forced;
}

namespace {

// Calls fn.operator()<ParamT>(). ParamT is the type of scale, bias and the residual's bias (if
// there is one). void: the types differ, have no kernel of their own, or a parameter is missing.
template <typename T, Division kDivision, bool kCentered, typename Fn>
cudaError_t DispatchParam(const RowNormFwdArgs& args, const Fn& fn) {
  const auto all = [&](ffi::DataType dtype) {
    const auto is = [&](const Param& p) { return p.data != nullptr && p.dtype == dtype; };
    return is(args.scale) && (!kCentered || is(args.bias)) &&
           (args.residual_bias.data == nullptr || is(args.residual_bias));
  };
  if (all(kDtype<Accum<T>>)) return fn.template operator()<Accum<T>>();
  if constexpr (sizeof(T) == 2 && kDivision == Division::kEven) {
    if (all(kDtype<T>)) return fn.template operator()<T>();
  }
  return fn.template operator()<void>();
}

constexpr std::int64_t kMaxGridY = 65535;
// What the blocks of a multiprocessor need if they have more than a warp or two. The GPU gives 16
// KB.
constexpr int kLeastSharedBytes = 10 * 1024;

// A grid of `blocks` blocks for each group.
cudaError_t GridOf(std::int64_t groups, std::int64_t blocks, dim3& grid) {
  const std::int64_t y = std::min(groups, kMaxGridY);
  const std::int64_t z = CeilDiv(groups, y);
  if (blocks > std::numeric_limits<int>::max() || z > kMaxGridY) return cudaErrorInvalidValue;
  grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(y), static_cast<unsigned>(z));
  return cudaSuccess;
}

template <typename T, typename ParamT, int P, Division kDivision, bool kCentered>
cudaError_t LaunchForward(cudaStream_t stream, const RowNormFwdArgs& args,
                          const ForwardPlan& plan) {
  auto* const kernel = &ForwardKernel<T, ParamT, P, kDivision, kCentered>;
  const auto ask = [&](int& answer) {
    // Loads under way need a place in the L1 cache, and parameters should stay there. Blocks need
    // little shared memory, so it gets only this percentage.
    const int least = 100 * kLeastSharedBytes / std::max(1, CurrentDevice().shared_bytes) + 1;
    answer = 1;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                std::min(100, least));
  };
  int asked = 0;
  cudaError_t status = Remembered(reinterpret_cast<const void*>(kernel), 0, 0, 1, asked, ask);
  dim3 grid;
  if (status == cudaSuccess) {
    status = GridOf(args.shape.groups, CeilDiv(args.shape.rows, plan.teams), grid);
  }
  if (status != cudaSuccess) return status;
  const Launch launch(stream, grid, plan.threads(), 0, 1);
  return cudaLaunchKernelEx(&launch.config, kernel, args, plan, ForwardScalars<Accum<T>>(args));
}

// Blocks take rows one after the other. done: false if the GPU cannot run such clusters.
template <typename T, bool kCentered, bool kResidual>
cudaError_t LaunchForwardRows(cudaStream_t stream, const RowNormFwdArgs& args, ForwardPlan plan,
                              bool& done) {
  auto* const kernel = &ForwardRowsKernel<T, kCentered, kResidual>;
  std::int64_t resident = 0;
  cudaError_t status =
      CountResident(kernel, plan.threads(), plan.shared_bytes, plan.cluster, resident);
  if (status != cudaSuccess) return status;
  done = resident > 0;
  if (!done) return cudaSuccess;
  // Persistent blocks do not all end at once, and several waves of blocks even that out. But each
  // block loads its parameters: several waves pay only if there are few parameters.
  const int waves = !kCentered && sizeof(T) > 2 && plan.cluster == 1 ? 8 : 1;
  const std::int64_t clusters = std::max<std::int64_t>(1, waves * resident / args.shape.groups);
  const std::int64_t row_bytes = args.shape.features * static_cast<std::int64_t>(sizeof(T));
  const std::int64_t blocks = plan.Deal(args.shape.rows, row_bytes, clusters) * plan.cluster;
  dim3 grid;
  status = GridOf(args.shape.groups, blocks, grid);
  if (status != cudaSuccess) return status;
  const Launch launch(stream, grid, plan.threads(), plan.shared_bytes, plan.cluster);
  return cudaLaunchKernelEx(&launch.config, kernel, args, plan, ForwardScalars<Accum<T>>(args));
}

template <typename T, bool kCentered>
cudaError_t LaunchForwardNarrow(cudaStream_t stream, const RowNormFwdArgs& args,
                                const NarrowPlan& plan) {
  auto* const kernel = &ForwardNarrowKernel<T, kCentered>;
  std::int64_t resident = 0;
  cudaError_t status = CountResident(kernel, plan.threads(), plan.shared_bytes, 1, resident);
  if (status != cudaSuccess) return status;
  const NarrowDeal deal = DealNarrow(plan, args.shape, resident, resident);
  dim3 grid;
  status = GridOf(args.shape.groups, deal.slots, grid);
  if (status != cudaSuccess) return status;
  const Launch launch(stream, grid, plan.threads(), plan.shared_bytes, 1);
  return cudaLaunchKernelEx(&launch.config, kernel, args, plan, deal,
                            ForwardScalars<Accum<T>>(args));
}

template <typename T, bool kCentered>
cudaError_t Forward(cudaStream_t stream, RowNormFwdArgs args) {
  if (args.shape.all_rows() == 0) return cudaSuccess;
  if (args.scale.group_stride == 0 && args.bias.group_stride == 0 &&
      args.residual_bias.group_stride == 0) {
    args.shape = {1, args.shape.all_rows(), args.shape.features};  // groups differ in parameters
  }
  const std::int64_t features = args.shape.features;
  const bool aligned = Aligned(args.x, args.residual, args.y, args.sum);
  const bool aligned_params = Aligned(args.scale.data, args.bias.data, args.residual_bias.data) &&
                              (args.shape.groups == 1 || features % kVec<T> == 0);
  RowTask task =
      TaskOf(args.shape, sizeof(T), args.residual == nullptr ? 1 : 2, aligned, aligned_params);
  task.rows = args.shape.rows;  // a block takes rows of one group
  task.centered = kCentered;
  const ForwardPlan plan = ChooseForwardPlan(task, ForcedRowPlan());
  if (!plan.stream && plan.framed()) {
    const NarrowPlan narrow =
        ChooseNarrowPlan(task, NarrowForwardExtra(task, args.residual_bias.data != nullptr));
    if (narrow.lanes > 0) return LaunchForwardNarrow<T, kCentered>(stream, args, narrow);
    bool done = false;
    const cudaError_t status =
        args.residual == nullptr ? LaunchForwardRows<T, kCentered, false>(stream, args, plan, done)
                                 : LaunchForwardRows<T, kCentered, true>(stream, args, plan, done);
    if (done || status != cudaSuccess) return status;
  } else if (!plan.stream) {
    const auto launch = [&]<int P, Division kDivision>() {
      return DispatchParam<T, kDivision, kCentered>(args, [&]<typename ParamT>() {
        return LaunchForward<T, ParamT, P, kDivision, kCentered>(stream, args, plan);
      });
    };
    const auto with_packs = [&]<Division kDivision>() {
      return plan.packs == 4 ? launch.template operator()<4, kDivision>()
                             : launch.template operator()<8, kDivision>();
    };
    return plan.packs == 3 ? launch.template operator()<3, Division::kEven>()
           : plan.division == Division::kUneven
               ? with_packs.template operator()<Division::kUneven>()
               : with_packs.template operator()<Division::kEven>();
  }
  return DispatchWidth<T>(aligned && aligned_params, features, [&]<int W>() {
    ForwardStreamKernel<T, W>
        <<<GridBlocks(args.shape.all_rows()), kStreamThreads, 0, stream>>>(args);
    return cudaGetLastError();
  });
}

}  // namespace

ffi::Error RowNormFwd(CudaContext stream, const RowNormFwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "row_norm_fwd", args.dtype, [&]<typename T>() {
    return ToError("row_norm_fwd", args.centered ? Forward<T, true>(stream, args)
                                                 : Forward<T, false>(stream, args));
  });
}

}  // namespace gradops
