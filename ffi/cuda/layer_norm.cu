// Layer norm and RMS norm, CUDA.
//
// How rows are laid out on the chip: cuda/layer_norm_policy.h. Each unit of threads (a warp, or the
// warps of a row) is persistent: it takes every so many-th row, or small rows by the warp, and has
// a ring of them in shared memory, of which all but one are on their way while one is worked on.
// Rows that start anywhere are copied from 16-byte boundary to 16-byte boundary and read from
// shared memory by single elements; so a thread's columns are the same in every row, and parameters
// and column sums stay in registers.
//
// Forward: two passes over registers in each warp, whose means and sums of squares are then merged
// (layer_norm_fwd.cuh), and one for y. Traffic: x read, y written; with a residual, x and residual
// read, sum and y written.
//
// Backward (formulas: common/math.h): each block has a slot in a group: a share of the group's
// rows, and one partial row of column sums, which stay in registers over the rows, are added over
// units, and then over slots (column_sum.cuh), in a fixed order. Traffic: dy and x (and dsum) read,
// dx written, and a partial row per block.
#include "ops/layer_norm.h"

#include <algorithm>
#include <cstdint>

#include "cuda/column_sum.cuh"
#include "cuda/launch.cuh"
#include "cuda/layer_norm_bwd.cuh"
#include "cuda/layer_norm_fwd.cuh"
#include "cuda/layer_norm_override.h"
#include "cuda/layer_norm_stream.cuh"

namespace gradops {

RowOverride& ForcedRowPlan() {
  static RowOverride forced{};
  return forced;
}

namespace {

// Sets what does not change from call to call: as much shared memory as any plan takes, and that
// split of it and the L1 cache, as another one makes multiprocessors idle between kernels.
cudaError_t Prepare(const void* kernel, bool large_cluster) {
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            CurrentDevice().shared_bytes - 4096);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
  if (status != cudaSuccess || !large_cluster) return status;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

// Launches a persistent kernel with so many blocks, in whole clusters.
template <typename... Params, typename... Args>
cudaError_t LaunchRows(cudaStream_t stream, const RowPlan& plan, std::int64_t blocks,
                       void (*kernel)(Params...), const Args&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(plan.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(plan.threads()));
  config.dynamicSmemBytes = static_cast<std::size_t>(plan.shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = plan.cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

// How many clusters (blocks, where a row has one) run at a time; 0 if none can.
template <typename Kernel>
cudaError_t CountResident(const RowPlan& plan, Kernel* kernel, std::int64_t& resident) {
  int count = 0;
  cudaError_t status = Prepare(reinterpret_cast<const void*>(kernel), plan.cluster > 8);
  if (status != cudaSuccess && plan.cluster == 1) return status;
  if (plan.cluster == 1) {
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &count, kernel, plan.threads(), static_cast<std::size_t>(plan.shared_bytes));
    resident = std::int64_t{std::max(1, count)} * MultiprocessorCount();
    return status;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(plan.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.cluster));
  config.blockDim = dim3(static_cast<unsigned>(plan.threads()));
  config.dynamicSmemBytes = static_cast<std::size_t>(plan.shared_bytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  if (status == cudaSuccess) status = cudaOccupancyMaxActiveClusters(&count, kernel, &config);
  if (status != cudaSuccess) cudaGetLastError();  // a GPU, or a part of one, without such clusters
  resident = status == cudaSuccess ? count : 0;
  return cudaSuccess;
}

template <typename T>
RowPlan PlanRows(const RowShape& shape, int arrays, bool backward, bool aligned) {
  const Device device = CurrentDevice();
  return ChooseRowPlan({.rows = shape.all_rows(),
                        .features = shape.features,
                        .element_bytes = sizeof(T),
                        .arrays = arrays,
                        .backward = backward,
                        .aligned = aligned && shape.features % kVec<T> == 0,
                        .architecture = device.architecture,
                        .multiprocessors = device.multiprocessors,
                        .shared_bytes = device.shared_bytes},
                       ForcedRowPlan());
}

// Calls fn.operator()<kVec<T>>() or fn.operator()<1>().
template <typename T, typename Fn>
cudaError_t DispatchWidth(int width, const Fn& fn) {
  return width > 1 ? fn.template operator()<kVec<T>>() : fn.template operator()<1>();
}

template <typename T, bool kCentered>
cudaError_t Forward(cudaStream_t stream, LayerNormFwdArgs args) {
  if (args.shape.all_rows() == 0) return cudaSuccess;
  if (args.scale.group_stride == 0 && args.bias.group_stride == 0) {
    args.shape = {1, args.shape.all_rows(), args.shape.features};  // groups differ in parameters
  }
  const auto [groups, rows, features] = args.shape;
  const RowPlan plan = PlanRows<T>(
      args.shape, args.residual == nullptr ? 1 : 2, /*backward=*/false,
      Aligned(args.x, args.residual, args.y, args.sum, args.scale.data, args.bias.data));
  return DispatchWidth<T>(plan.width, [&]<int W>() {
    auto* const kernel = &ForwardKernel<T, W, kCentered>;
    std::int64_t resident = 0;
    if (!plan.stream) {
      const cudaError_t status = CountResident(plan, kernel, resident);
      if (status != cudaSuccess) return status;
    }
    if (resident == 0) {
      ForwardStreamKernel<T, W><<<GridBlocks(groups * rows), kStreamThreads, 0, stream>>>(args);
      return cudaGetLastError();
    }
    const std::int64_t items = CeilDiv(rows, plan.unit_rows() * plan.units);
    const std::int64_t slots = std::min(items, std::max<std::int64_t>(1, resident / groups));
    const std::int64_t clusters = std::min(resident, groups * slots);
    return LaunchRows(stream, plan, clusters * plan.cluster, kernel, args, plan,
                      Deal(plan, rows, slots, features));
  });
}

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

template <typename T, bool kCentered, bool kFromOutput>
cudaError_t Backward(cudaStream_t stream, const LayerNormBwdArgs& args) {
  using A = Accum<T>;
  const auto [groups, rows, features] = args.shape;
  ColumnSums wanted;
  wanted.Add(args.dscale);
  wanted.Add(args.dbias);
  if (args.shape.elements() == 0) return ZeroColumnSums(stream, wanted, groups, features);
  const RowPlan plan = PlanRows<T>(args.shape, args.dsum == nullptr ? 2 : 3, /*backward=*/true,
                                   Aligned(args.dy, args.x, args.dsum, args.dx, args.workspace,
                                           args.scale.data, args.bias.data));
  auto* const workspace = static_cast<A*>(args.workspace);
  std::int64_t slots = 1;
  const cudaError_t status = DispatchWidth<T>(plan.width, [&]<int W>() {
    auto* const kernel = &BackwardKernel<T, W, kCentered, kFromOutput>;
    std::int64_t resident = 0;
    if (!plan.stream) {
      const cudaError_t status = CountResident(plan, kernel, resident);
      if (status != cudaSuccess) return status;
    }
    if (resident == 0) {
      const std::int64_t scratch = groups * args.partial_rows * wanted.count * features;
      const cudaError_t status = BackwardStreamed<T, W>(stream, args, wanted.count > 0, scratch);
      wanted.count = 0;  // nothing is left to do
      return status;
    }
    const std::int64_t items = CeilDiv(rows, plan.unit_rows() * plan.units);
    slots = std::min(items, std::max<std::int64_t>(1, resident / groups));
    if (wanted.count > 0) slots = std::min(slots, args.partial_rows);
    SlotSums<A> sums{{nullptr, nullptr}, features, 0};
    const auto in_accum = [](const ParamGrad& g) {
      return g.data == nullptr || g.dtype == kDtype<A>;
    };
    const bool at_once = slots == 1 && in_accum(args.dscale) && in_accum(args.dbias) &&
                         Aligned(args.dscale.data, args.dbias.data);
    int place = 0;
    for (int s = 0; s < 2; ++s) {
      const ParamGrad& result = s == 0 ? args.dscale : args.dbias;
      if (result.data == nullptr) continue;
      sums.results[s] = at_once ? static_cast<A*>(result.data) : workspace + place++ * features;
    }
    if (!at_once) {
      sums.group_pitch = args.partial_rows * wanted.count * features;
      sums.slot_pitch = wanted.count * features;
    } else {
      wanted.count = 0;  // nothing is left to do
    }
    const std::int64_t clusters = std::min(resident, groups * slots);
    return LaunchRows(stream, plan, clusters * plan.cluster, kernel, args, plan,
                      Deal(plan, rows, slots, features), sums);
  });
  if (status != cudaSuccess || wanted.count == 0) return status;
  return LaunchColumnSum<A>(stream, workspace, wanted, groups, args.partial_rows, slots, features);
}

const char* NameOf(const LayerNormFwdArgs& args) {
  return args.centered ? "layer_norm_fwd" : "rms_norm_fwd";
}

const char* NameOf(const LayerNormBwdArgs& args) {
  if (args.from_output) {
    return args.centered ? "layer_norm_bwd_from_output" : "rms_norm_bwd_from_output";
  }
  return args.centered ? "layer_norm_bwd" : "rms_norm_bwd";
}

}  // namespace

ffi::Error LayerNormFwd(CudaContext stream, const LayerNormFwdArgs& args) {
  return DispatchDtype(FloatTypes{}, NameOf(args), args.dtype, [&]<typename T>() {
    return ToError(NameOf(args), args.centered ? Forward<T, true>(stream, args)
                                               : Forward<T, false>(stream, args));
  });
}

ffi::Error LayerNormBwd(CudaContext stream, const LayerNormBwdArgs& args) {
  return DispatchDtype(FloatTypes{}, NameOf(args), args.dtype, [&]<typename T>() {
    const auto run =
        args.centered ? (args.from_output ? &Backward<T, true, true> : &Backward<T, true, false>)
                      : (args.from_output ? &Backward<T, false, true> : &Backward<T, false, false>);
    return ToError(NameOf(args), run(stream, args));
  });
}

}  // namespace gradops
