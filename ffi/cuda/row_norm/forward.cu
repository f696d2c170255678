// Layer norm and RMS norm forward, CUDA. README.md explains how rows are split among threads.
//
// One kernel loads one row into registers, one loads short rows. The kernel for many rows takes
// rows one after the other, and copies the next rows to shared memory in advance (forward.cuh).
// Each warp makes two passes over its part of a row. Then the warps' means and sums of squares are
// merged (moments.cuh). Narrow unaligned rows have a kernel of their own (narrow.cuh). Traffic: x
// is read, y is written. With a residual, x and residual are read, sum and y are written.
#include "cuda/row_norm/forward.cuh"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/row_norm/launch.cuh"
#include "cuda/row_norm/narrow.cuh"
#include "cuda/row_norm/stream.cuh"

namespace gradops {
namespace {

// What the blocks of a multiprocessor need if they have more than a warp or two. The GPU gives 16
// KB.
constexpr int kLeastSharedBytes = 10 * 1024;

// Launches `blocks` blocks for each group. `arguments` come between args and the scalars.
template <typename A, typename Kernel, typename... Arguments>
cudaError_t LaunchGroups(cudaStream_t stream, Kernel* kernel, std::int64_t blocks, int threads,
                         int shared_bytes, int cluster, const RowNormFwdArgs& args,
                         const Arguments&... arguments) {
  dim3 grid;
  const cudaError_t status = GridOfGroups(args.shape.groups, blocks, grid);
  if (status != cudaSuccess) return status;
  const Launch launch(stream, grid, dim3(static_cast<unsigned>(threads)), shared_bytes, cluster);
  return cudaLaunchKernelEx(&launch.config, kernel, args, arguments..., ForwardScalars<A>(args));
}

template <typename T>
using ForwardFunction = void (*)(RowNormFwdArgs, ForwardSplit, ForwardScalars<Accum<T>>);

// The kernel for one row, or for short rows. ParamT: the type of all parameters; void: any types,
// or one is missing.
template <typename T, typename ParamT, bool kCentered>
ForwardFunction<T> OneRowKernel(const ForwardSplit& split) {
  constexpr Layout kFull = Layout::kFull, kPartial = Layout::kPartial;
  if (split.kernel == RowKernel::kShort) return &ForwardShortKernel<T, kCentered>;
  if (split.vectors == 3) return &ForwardKernel<T, ParamT, 3, kFull, kCentered>;
  if (split.layout == kFull) {
    return split.vectors == 4 ? &ForwardKernel<T, ParamT, 4, kFull, kCentered>
                              : &ForwardKernel<T, ParamT, 8, kFull, kCentered>;
  }
  // 16-bit parameters have no code of their own here.
  using Other = std::conditional_t<std::is_same_v<ParamT, Accum<T>>, ParamT, void>;
  return split.vectors == 4 ? &ForwardKernel<T, Other, 4, kPartial, kCentered>
                            : &ForwardKernel<T, Other, 8, kPartial, kCentered>;
}
template <typename T, bool kCentered>
ForwardFunction<T> OneRowKernel(const RowNormFwdArgs& args, const ForwardSplit& split) {
  const auto all = [&](ffi::DataType dtype) {
    const auto is = [&](const Param& p) { return p.data != nullptr && p.dtype == dtype; };
    return is(args.scale) && (!kCentered || is(args.bias)) &&
           (args.residual_bias.data == nullptr || is(args.residual_bias));
  };
  if (all(kDtype<Accum<T>>)) return OneRowKernel<T, Accum<T>, kCentered>(split);
  if (sizeof(T) == 2 && all(kDtype<T>)) return OneRowKernel<T, T, kCentered>(split);
  return OneRowKernel<T, void, kCentered>(split);
}

template <typename T, bool kCentered>
cudaError_t LaunchOneRow(cudaStream_t stream, const RowNormFwdArgs& args,
                         const ForwardSplit& split) {
  const ForwardFunction<T> kernel = OneRowKernel<T, kCentered>(args, split);
  const auto ask = [&](int& answer) {
    // Loads in flight need a place in the L1 cache, and parameters should stay there. Blocks need
    // little shared memory, so it gets only this percentage.
    const int least = 100 * kLeastSharedBytes / std::max(1, CurrentDevice().shared_bytes) + 1;
    answer = 1;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                std::min(100, least));
  };
  int asked = 0;
  const cudaError_t status = Remembered(reinterpret_cast<const void*>(kernel), 0, 0, 1, asked, ask);
  if (status != cudaSuccess) return status;
  return LaunchGroups<Accum<T>>(stream, kernel, CeilDiv(args.shape.rows, split.rows_per_block),
                                split.threads(), 0, 1, args, split);
}

// Returns in `resident` how many clusters run at a time. If it is 0, there was no launch: the GPU
// cannot run such clusters.
template <typename T, bool kCentered>
cudaError_t LaunchManyRows(cudaStream_t stream, const RowNormFwdArgs& args,
                           const ForwardSplit& split, std::int64_t& resident) {
  auto* const kernel = args.residual == nullptr ? &ForwardRowsKernel<T, kCentered, false>
                                                : &ForwardRowsKernel<T, kCentered, true>;
  const cudaError_t status =
      CountResident(kernel, split.threads(), split.shared_bytes, split.cluster, resident);
  if (status != cudaSuccess || resident == 0) return status;
  // Persistent blocks do not all end at once, and several waves of blocks even that out. But each
  // block loads its parameters: several waves pay only if there are few parameters.
  const int waves = !kCentered && sizeof(T) > 2 && split.cluster == 1 ? 8 : 1;
  const std::int64_t clusters = std::max<std::int64_t>(1, waves * resident / args.shape.groups);
  const std::int64_t row_bytes = args.shape.features * static_cast<std::int64_t>(sizeof(T));
  const ForwardSchedule schedule = ScheduleForward(split, args.shape.rows, row_bytes, clusters);
  return LaunchGroups<Accum<T>>(stream, kernel, ClustersOf(split, schedule) * split.cluster,
                                split.threads(), split.shared_bytes, split.cluster, args, split,
                                schedule);
}

template <typename T, bool kCentered>
cudaError_t LaunchNarrow(cudaStream_t stream, const RowNormFwdArgs& args, const NarrowPlan& plan) {
  auto* const kernel = &ForwardNarrowKernel<T, kCentered>;
  std::int64_t resident = 0;
  const cudaError_t status = CountResident(kernel, plan.threads(), plan.shared_bytes, 1, resident);
  if (status != cudaSuccess) return status;
  const RowShape& shape = args.shape;
  const TileSchedule schedule = ScheduleTiles(plan, shape.groups, shape.rows, resident, resident);
  return LaunchGroups<Accum<T>>(stream, kernel, schedule.blocks_per_group, plan.threads(),
                                plan.shared_bytes, 1, args, plan, schedule);
}

// Groups that share all parameters are one group.
RowNormFwdArgs WithFewestGroups(RowNormFwdArgs args) {
  if (args.scale.group_stride == 0 && args.bias.group_stride == 0 &&
      args.residual_bias.group_stride == 0) {
    args.shape = {1, args.shape.all_rows(), args.shape.features};
  }
  return args;
}

template <typename T>
RowTask TaskOf(const RowNormFwdArgs& args) {
  const RowShape& shape = args.shape;
  RowTask task = TaskOfDevice();
  task.rows = shape.rows;  // A block takes rows of one group.
  task.features = shape.features;
  task.element_bytes = sizeof(T);
  task.arrays = args.residual == nullptr ? 1 : 2;
  task.aligned = Aligned(args.x, args.residual, args.y, args.sum);
  task.aligned_params = Aligned(args.scale.data, args.bias.data, args.residual_bias.data) &&
                        (shape.groups == 1 || shape.features % kVec<T> == 0);
  task.centered = args.centered;
  task.residual_bias = args.residual_bias.data != nullptr;
  return task;
}

template <typename T, bool kCentered>
cudaError_t Forward(cudaStream_t stream, const RowNormFwdArgs& given, const RowPlanLimits& limits) {
  if (given.shape.all_rows() == 0) return cudaSuccess;
  const RowNormFwdArgs args = WithFewestGroups(given);
  const ForwardPlan plan = ChooseForwardPlan(TaskOf<T>(args), limits);
  if (plan.kernel() == RowKernel::kNarrow) {
    return LaunchNarrow<T, kCentered>(stream, args, plan.narrow);
  }
  if (plan.kernel() == RowKernel::kOneRow || plan.kernel() == RowKernel::kShort) {
    return LaunchOneRow<T, kCentered>(stream, args, plan.split);
  }
  if (plan.kernel() == RowKernel::kManyRows) {
    std::int64_t resident = 0;
    const cudaError_t status = LaunchManyRows<T, kCentered>(stream, args, plan.split, resident);
    if (status != cudaSuccess || resident > 0) return status;
  }
  auto* const kernel =
      plan.reads_vectors ? &ForwardStreamKernel<T, kVec<T>> : &ForwardStreamKernel<T, 1>;
  kernel<<<GridBlocks(args.shape.all_rows()), kStreamThreads, 0, stream>>>(
      args, ForwardScalars<Accum<T>>(args));
  return cudaGetLastError();
}

}  // namespace

ffi::Error RowNormFwd(CudaContext stream, const RowNormFwdArgs& args, const RowPlanLimits& limits) {
  return DispatchDtype(FloatTypes{}, "row_norm_fwd", args.dtype, [&]<typename T>() {
    return ToError("row_norm_fwd", args.centered ? Forward<T, true>(stream, args, limits)
                                                 : Forward<T, false>(stream, args, limits));
  });
}
ffi::Error RowNormFwd(CudaContext stream, const RowNormFwdArgs& args) {
  return RowNormFwd(stream, args, {});
}

}  // namespace gradops
