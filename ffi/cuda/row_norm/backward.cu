// Layer norm and RMS norm backward, CUDA. README.md explains how rows are split among threads, and
// plan.h how the kernel for dx works. common/math.h has the formulas.
//
// Each block adds up column sums of the rows that it has. They are added over its threads and then
// over the blocks (column_sum.cuh), in a fixed order. For few rows a separate kernel beside the
// kernel for dx computes the column sums. It reads dy and x once more. Traffic: dy, x and dsum (if
// given) are read. dx is written, and a row of column sums per block.
#include "cuda/row_norm/backward.cuh"

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "cuda/common/column_sum.cuh"
#include "cuda/row_norm/launch.cuh"
#include "cuda/row_norm/narrow.cuh"
#include "cuda/row_norm/stream.cuh"

namespace gradops {
namespace {

ColumnSums WantedSums(const RowNormBwdArgs& args) {
  ColumnSums wanted;
  wanted.Add(args.dscale);
  wanted.Add(args.dbias);
  wanted.Add(args.dresidual_bias);
  return wanted;
}

template <typename T>
RowTask TaskOf(const RowNormBwdArgs& args) {
  RowTask task = TaskOfDevice();
  task.rows = args.shape.all_rows();
  task.features = args.shape.features;
  task.element_bytes = sizeof(T);
  task.arrays = args.dsum == nullptr ? 2 : 3;
  task.aligned = Aligned(args.dy, args.x, args.dsum, args.dx, args.workspace);
  task.aligned_params = Aligned(args.scale.data, args.bias.data);
  task.centered = args.centered;
  task.groups = args.shape.groups;
  task.sums = WantedSums(args).count > 0;
  task.sums_dx = args.dresidual_bias.data != nullptr;
  task.reads_mean = args.centered && !args.from_output;
  task.knows_epsilon = args.epsilon >= 0;
  return task;
}

// Rows are read twice, and a third time for column sums.
template <typename T, int W>
cudaError_t LaunchStream(cudaStream_t stream, const RowNormBwdArgs& args, bool sums) {
  const auto [groups, rows, features] = args.shape;
  const bool reads_mean = args.centered && !args.from_output;
  const std::int64_t scratch = groups * args.partial_rows * WantedSums(args).count * features;
  if (sums && reads_mean && scratch < groups * rows) return cudaErrorInvalidValue;
  auto* const deltas = sums && reads_mean ? static_cast<Accum<T>*>(args.workspace) : nullptr;
  BackwardStreamKernel<T, W>
      <<<GridBlocks(groups * rows), kStreamThreads, 0, stream>>>(args, deltas);
  if (sums) {
    const std::int64_t items = groups * CeilDiv(features, kColumnThreads * W);
    BackwardSumsKernel<T, W>
        <<<GridBlocks(items), dim3(kColumnThreads, kRowThreads), 0, stream>>>(args, deltas);
  }
  return cudaGetLastError();
}

// Column sums of few rows, from dy and x. They need no dx, so this kernel starts beside the kernel
// before, if that allows it. Adding partial sums would have to wait for that kernel.
template <typename T, int W>
cudaError_t LaunchFewSums(cudaStream_t stream, const RowNormBwdArgs& args) {
  const EarlyLaunch launch(stream,
                           dim3(GridBlocks(CeilDiv(args.shape.features, kColumnThreads * W))),
                           dim3(kColumnThreads, kRowThreads));
  return cudaLaunchKernelEx(&launch.config, &BackwardSumsKernel<T, W>, args,
                            static_cast<const Accum<T>*>(nullptr));
}

// The kernel for dx, for many rows. Full rows use the code for partial rows too: here that costs
// hardly any time.
template <typename T, bool kCentered, bool kFromOutput>
auto* DxKernel(const BackwardSplit& split) {
  constexpr Layout kMasked = Layout::kMasked, kPartial = Layout::kPartial;
  const bool few = split.vectors == kFewVectors;
  if (split.layout == kMasked) {
    return few ? &BackwardKernel<T, kFewVectors, kMasked, kCentered, kFromOutput>
               : &BackwardKernel<T, kMaskedVectors, kMasked, kCentered, kFromOutput>;
  }
  return few ? &BackwardKernel<T, kFewVectors, kPartial, kCentered, kFromOutput>
             : &BackwardKernel<T, MoreVectors(sizeof(T)), kPartial, kCentered, kFromOutput>;
}

// The blocks of the kernel for dx store column sums here. If each group has one cluster, and the
// results have its type, its sums are the results.
template <typename A>
struct SumTargets {
  PartialSums<A> partial{};
  bool are_results = false;
};
template <typename A>
SumTargets<A> TargetsOf(const RowNormBwdArgs& args, std::int64_t clusters_per_group) {
  const std::int64_t features = args.shape.features, count = WantedSums(args).count;
  const ParamGrad* const results[] = {&args.dscale, &args.dbias, &args.dresidual_bias};
  SumTargets<A> targets;
  targets.are_results = clusters_per_group == 1 &&
                        std::all_of(std::begin(results), std::end(results), [](const ParamGrad* g) {
                          return g->data == nullptr || (g->dtype == kDtype<A> && Aligned(g->data));
                        });
  PartialSums<A>& partial = targets.partial;
  partial.group_pitch = targets.are_results ? features : args.partial_rows * count * features;
  partial.cluster_pitch = targets.are_results ? 0 : count * features;
  auto* scratch = static_cast<A*>(args.workspace);
  for (int s = 0; s < 3; ++s) {
    if (results[s]->data == nullptr) continue;
    partial.results[s] = targets.are_results ? static_cast<A*>(results[s]->data) : scratch;
    scratch += features;
  }
  return targets;
}

// dx by `kernel`, which takes a split and a schedule, on `clusters` clusters.
template <typename T, typename Kernel, typename Split, typename Schedule>
cudaError_t LaunchDx(cudaStream_t stream, const RowNormBwdArgs& args, Kernel* kernel,
                     const Split& split, const Schedule& schedule, std::int64_t clusters,
                     int cluster, const PartialSums<Accum<T>>& sums) {
  const Launch launch(stream, dim3(static_cast<unsigned>(clusters * cluster)),
                      dim3(static_cast<unsigned>(split.threads())), split.shared_bytes, cluster);
  const auto inverse_features =
      static_cast<Accum<T>>(1.0 / static_cast<double>(args.shape.features));
  return cudaLaunchKernelEx(&launch.config, kernel, args, split, schedule, sums, inverse_features);
}

template <typename T, bool kCentered, bool kFromOutput>
cudaError_t Backward(cudaStream_t stream, const RowNormBwdArgs& args, const RowPlanLimits& limits) {
  using A = Accum<T>;
  const auto [groups, rows, features] = args.shape;
  const ColumnSums wanted = WantedSums(args);
  if (args.shape.elements() == 0) return ZeroColumnSums(stream, wanted, groups, features);
  const BackwardPlan plan = ChooseBackwardPlan(TaskOf<T>(args), limits);
  const BackwardSplit& split = plan.split;
  auto* const dx_kernel = DxKernel<T, kCentered, kFromOutput>(split);
  auto* const narrow_kernel = &BackwardNarrowKernel<T, kCentered, kFromOutput>;
  const bool is_narrow = plan.kernel() == RowKernel::kNarrow;

  std::int64_t resident = 0;  // Clusters of the kernel for dx that run at a time.
  cudaError_t status = cudaSuccess;
  if (is_narrow) {
    const NarrowPlan& narrow = plan.narrow;
    status = CountResident(narrow_kernel, narrow.threads(), narrow.shared_bytes, 1, resident);
  } else if (plan.kernel() == RowKernel::kManyRows) {
    status = CountResident(dx_kernel, split.threads(), split.shared_bytes, split.cluster, resident);
  }
  if (status != cudaSuccess) return status;
  if (resident == 0) {  // The plan says so, or the GPU cannot run such clusters.
    return plan.reads_vectors ? LaunchStream<T, kVec<T>>(stream, args, wanted.count > 0)
                              : LaunchStream<T, 1>(stream, args, wanted.count > 0);
  }

  const bool sums = plan.sums == SumsBy::kDxKernel;
  const std::int64_t most = sums ? args.partial_rows : resident;
  const TileSchedule tiles =
      is_narrow ? ScheduleTiles(plan.narrow, groups, rows, resident, most) : TileSchedule{};
  const std::int64_t per_group =
      is_narrow ? tiles.blocks_per_group
                : std::min({CeilDiv(rows, split.team_rows() * split.teams), most,
                            std::max<std::int64_t>(1, resident / groups)});
  const SumTargets<A> targets = sums ? TargetsOf<A>(args, per_group) : SumTargets<A>{};
  const std::int64_t clusters = std::min(resident, groups * per_group);
  status = is_narrow ? LaunchDx<T>(stream, args, narrow_kernel, plan.narrow, tiles, clusters, 1,
                                   targets.partial)
                     : LaunchDx<T>(stream, args, dx_kernel, split,
                                   ScheduleBackward(split, rows, per_group), clusters,
                                   split.cluster, targets.partial);
  if (status != cudaSuccess) return status;
  if (plan.sums == SumsBy::kBesideDx) {
    return plan.reads_vectors ? LaunchFewSums<T, kVec<T>>(stream, args)
                              : LaunchFewSums<T, 1>(stream, args);
  }
  if (!sums || targets.are_results) return cudaSuccess;
  return LaunchColumnSum<A>(stream, static_cast<const A*>(args.workspace), wanted, groups,
                            args.partial_rows, per_group, features);
}

}  // namespace

ffi::Error RowNormBwd(CudaContext stream, const RowNormBwdArgs& args, const RowPlanLimits& limits) {
  return DispatchDtype(FloatTypes{}, "row_norm_bwd", args.dtype, [&]<typename T>() {
    const auto run =
        args.centered ? (args.from_output ? &Backward<T, true, true> : &Backward<T, true, false>)
                      : (args.from_output ? &Backward<T, false, true> : &Backward<T, false, false>);
    return ToError("row_norm_bwd", run(stream, args, limits));
  });
}
ffi::Error RowNormBwd(CudaContext stream, const RowNormBwdArgs& args) {
  return RowNormBwd(stream, args, {});
}

}  // namespace gradops
