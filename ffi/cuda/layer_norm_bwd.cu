// Layer norm and RMS norm backward, CUDA; formulas: common/math.h.
//
// How rows are laid out on the chip: cuda/layer_norm_bwd_policy.h. Each unit of threads (a warp, or
// the warps of a row) is persistent: it takes every so many-th row, or small rows by the warp
// (layer_norm_bwd.cuh), and each of its threads has its part of the next ones on their way to
// shared memory (layer_norm_ring.cuh). Each block has a slot in a group: a share of the group's
// rows, and one partial row of column sums, which stay in registers (dx's: in shared memory) over
// the rows, are added over units, and then over slots (column_sum.cuh), in a fixed order. Traffic:
// dy and x (and dsum) read, dx written, and a partial row per block.
//
// Rows that start anywhere: as forward.
#include "cuda/layer_norm_bwd.cuh"

#include <algorithm>
#include <cstdint>

#include "cuda/column_sum.cuh"
#include "cuda/layer_norm_launch.cuh"
#include "cuda/layer_norm_stream.cuh"

namespace gradops {
namespace {

// scratch: values that the workspace has.
template <typename T, int W>
cudaError_t BackwardStreamed(cudaStream_t stream, const LayerNormBwdArgs& args, bool sums,
                             std::int64_t scratch) {
  const auto [groups, rows, features] = args.shape;
  const bool shift = sums && args.centered && !args.from_output;
  if (shift && scratch < groups * rows) return cudaErrorInvalidValue;
  auto* const deltas = shift ? static_cast<Accum<T>*>(args.workspace) : nullptr;
  BackwardStreamKernel<T, W>
      <<<GridBlocks(groups * rows), kStreamThreads, 0, stream>>>(args, deltas);
  if (sums) {
    const std::int64_t items = groups * CeilDiv(features, kSumLanes * W);
    BackwardSumsKernel<T, W>
        <<<GridBlocks(items), dim3(kSumLanes, kSumRows), 0, stream>>>(args, deltas);
  }
  return cudaGetLastError();
}

// How many blocks, or clusters, of a persistent kernel run at a time; 0: clusters, but none can.
template <typename Kernel>
cudaError_t CountResident(const BackwardPlan& plan, Kernel* kernel, std::int64_t& resident) {
  const auto ask = [&](int& count) {
    // As much shared memory as any plan takes, and always the same split of it and the L1 cache, as
    // another one makes multiprocessors idle between kernels.
    cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              CurrentDevice().shared_bytes - kSparedBytes);
    if (status != cudaSuccess) return status;
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared);
    if (status != cudaSuccess) return status;
    if (plan.cluster > 1) {
      count = ResidentClusters(kernel, plan.threads(), plan.shared_bytes, plan.cluster);
      return cudaSuccess;
    }
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &count, kernel, plan.threads(), static_cast<std::size_t>(plan.shared_bytes));
    count = std::max(1, count) * MultiprocessorCount();
    return status;
  };
  int count = 0;
  const cudaError_t status = Remembered(reinterpret_cast<const void*>(kernel), plan.threads(),
                                        plan.shared_bytes, plan.cluster, count, ask);
  resident = count;
  return status;
}

template <typename T, bool kCentered, bool kFromOutput>
cudaError_t Backward(cudaStream_t stream, const LayerNormBwdArgs& args) {
  using A = Accum<T>;
  const auto [groups, rows, features] = args.shape;
  ColumnSums wanted;
  wanted.Add(args.dscale);
  wanted.Add(args.dbias);
  wanted.Add(args.dresidual_bias);
  if (args.shape.elements() == 0) return ZeroColumnSums(stream, wanted, groups, features);
  const bool aligned = Aligned(args.dy, args.x, args.dsum, args.dx, args.workspace);
  const bool aligned_params = Aligned(args.scale.data, args.bias.data);
  RowTask task =
      TaskOf(args.shape, sizeof(T), args.dsum == nullptr ? 2 : 3, aligned, aligned_params);
  task.sums_dx = args.dresidual_bias.data != nullptr;
  const BackwardPlan plan = ChooseBackwardPlan(task, ForcedRowPlan());
  auto* const workspace = static_cast<A*>(args.workspace);
  std::int64_t resident = 0, slots = 1;

  const auto run = [&]<int P, Division kDivision>() {
    auto* const kernel = &BackwardKernel<T, P, kDivision, kCentered, kFromOutput>;
    const cudaError_t status = CountResident(plan, kernel, resident);
    if (status != cudaSuccess || resident == 0) return status;
    const std::int64_t items = CeilDiv(rows, plan.unit_rows() * plan.units);
    slots = std::min(items, std::max<std::int64_t>(1, resident / groups));
    if (wanted.count > 0) slots = std::min(slots, args.partial_rows);
    SlotSums<A> sums{{nullptr, nullptr, nullptr}, features, 0};
    const auto in_accum = [](const ParamGrad& g) {
      return g.data == nullptr || g.dtype == kDtype<A>;
    };
    const ParamGrad* const results[] = {&args.dscale, &args.dbias, &args.dresidual_bias};
    const bool at_once = slots == 1 && in_accum(args.dscale) && in_accum(args.dbias) &&
                         in_accum(args.dresidual_bias) &&
                         Aligned(args.dscale.data, args.dbias.data, args.dresidual_bias.data);
    int place = 0;
    for (int s = 0; s < 3; ++s) {
      const ParamGrad& result = *results[s];
      if (result.data == nullptr) continue;
      sums.results[s] = at_once ? static_cast<A*>(result.data) : workspace + place++ * features;
    }
    if (!at_once) {
      sums.group_pitch = args.partial_rows * wanted.count * features;
      sums.slot_pitch = wanted.count * features;
    } else {
      wanted.count = 0;  // nothing is left to do
    }
    const std::int64_t blocks = std::min(resident, groups * slots) * plan.cluster;
    const Launch launch(stream, dim3(static_cast<unsigned>(blocks)), plan.threads(),
                        plan.shared_bytes, plan.cluster);
    return cudaLaunchKernelEx(&launch.config, kernel, args, plan, Deal(plan, rows, slots), sums,
                              static_cast<A>(1.0 / static_cast<double>(features)));
  };
  if (!plan.stream) {
    // Here what it costs that rows may be uneven hardly shows.
    constexpr int kMore = MorePacks(sizeof(T));
    const cudaError_t status = plan.division == Division::kFramed
                                   ? run.template operator()<kFramedPacks, Division::kFramed>()
                               : plan.packs == kFewPacks
                                   ? run.template operator()<kFewPacks, Division::kUneven>()
                                   : run.template operator()<kMore, Division::kUneven>();
    if (status != cudaSuccess) return status;
  }
  if (resident == 0) {
    const std::int64_t scratch = groups * args.partial_rows * wanted.count * features;
    return DispatchWidth<T>(aligned && aligned_params, features, [&]<int W>() {
      return BackwardStreamed<T, W>(stream, args, wanted.count > 0, scratch);
    });
  }
  if (wanted.count == 0) return cudaSuccess;
  return LaunchColumnSum<A>(stream, workspace, wanted, groups, args.partial_rows, slots, features);
}

const char* NameOf(const LayerNormBwdArgs& args) {
  if (args.from_output) {
    return args.centered ? "layer_norm_bwd_from_output" : "rms_norm_bwd_from_output";
  }
  return args.centered ? "layer_norm_bwd" : "rms_norm_bwd";
}

}  // namespace

ffi::Error LayerNormBwd(CudaContext stream, const LayerNormBwdArgs& args) {
  return DispatchDtype(FloatTypes{}, NameOf(args), args.dtype, [&]<typename T>() {
    const auto run =
        args.centered ? (args.from_output ? &Backward<T, true, true> : &Backward<T, true, false>)
                      : (args.from_output ? &Backward<T, false, true> : &Backward<T, false, false>);
    return ToError(NameOf(args), run(stream, args));
  });
}

}  // namespace gradops
