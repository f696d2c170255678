// Layer norm and RMS norm, CUDA.
//
// How rows are laid out on the chip: cuda/layer_norm_policy.h.
//
// Forward: a block per row (some rows, where they are narrow), which loads it into registers, makes
// two passes over them in each warp, merges the warps' means and sums of squares
// (layer_norm_fwd.cuh), and stores y. Traffic: x read, y written; with a residual, x and residual
// read, sum and y written.
//
// Backward (formulas: common/math.h): each unit of threads (a warp, or the warps of a row) is
// persistent: it takes every so many-th row, or small rows by the warp, and has a ring of them in
// shared memory (layer_norm_ring.cuh), of which those not worked on are on their way
// (layer_norm_bwd.cuh). Each block has a slot in a group: a share of the group's rows, and one
// partial row of column sums, which stay in registers over the rows, are added over units, and then
// over slots (column_sum.cuh), in a fixed order. Traffic: dy and x (and dsum) read, dx written, and
// a partial row per block.
//
// Rows that start anywhere are read and written by the 16 bytes too, from 16-byte boundary to
// 16-byte boundary, so that only a row's first and last few elements need care: see Place.
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

// A launch of `grid` blocks, in whole clusters; valid as long as it is not copied.
struct Launch {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  Launch(cudaStream_t stream, dim3 grid, int threads, int shared_bytes, int cluster) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = cluster > 1 ? 1 : 0;
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
};

// How many clusters run at a time; 0 if none can: a GPU, or a part of one, without such clusters.
template <typename Kernel>
int ResidentClusters(Kernel* kernel, int threads, int shared_bytes, int cluster) {
  int count = 0;
  cudaError_t status = cudaSuccess;
  if (cluster > 8) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  const Launch launch(nullptr, dim3(static_cast<unsigned>(cluster)), threads, shared_bytes,
                      cluster);
  if (status == cudaSuccess) {
    status = cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config);
  }
  if (status == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

RowTask TaskOf(const RowShape& shape, int element_bytes, int arrays, bool aligned,
               bool aligned_params) {
  const Device device = CurrentDevice();
  return {.rows = shape.all_rows(),
          .features = shape.features,
          .element_bytes = element_bytes,
          .arrays = arrays,
          .aligned = aligned,
          .aligned_params = aligned_params,
          .architecture = device.architecture,
          .multiprocessors = device.multiprocessors,
          .shared_bytes = device.shared_bytes};
}

// Calls fn.operator()<kVec<T>>() or fn.operator()<1>().
template <typename T, typename Fn>
cudaError_t DispatchWidth(bool aligned, std::int64_t features, const Fn& fn) {
  return aligned && features % kVec<T> == 0 ? fn.template operator()<kVec<T>>()
                                            : fn.template operator()<1>();
}

// Calls fn.operator()<ParamT>(): what a forward kernel takes scale and bias for; void: for
// anything, or nothing.
template <typename T, Division kDivision, bool kCentered, typename Fn>
cudaError_t DispatchParam(const Param& scale, const Param& bias, bool wide, const Fn& fn) {
  const auto both = [&](ffi::DataType dtype) {
    return scale.data != nullptr && scale.dtype == dtype &&
           (!kCentered || (bias.data != nullptr && bias.dtype == dtype));
  };
  if (wide && both(kDtype<Accum<T>>)) return fn.template operator()<Accum<T>>();
  if constexpr (sizeof(T) == 2 && kDivision == Division::kEven) {
    if (both(kDtype<T>)) return fn.template operator()<T>();
  }
  return fn.template operator()<void>();
}

constexpr std::int64_t kMaxGridY = 65535;
template <typename T, typename ParamT, int P, Division kDivision, bool kCentered>
cudaError_t LaunchForward(cudaStream_t stream, const LayerNormFwdArgs& args,
                          const ForwardPlan& plan, bool& done) {
  auto* const kernel = &ForwardKernel<T, ParamT, P, kDivision, kCentered>;
  constexpr bool kFramed = kDivision == Division::kFramed;
  cudaError_t status = cudaSuccess;
  if constexpr (kFramed) {
    status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kFramedBytes);
  }
  // Parameters shall stay in the L1 cache: so much (in %) is enough for blocks' own memory.
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  kFramed ? (sizeof(T) == 2 ? 75 : 40) : 10);
  }
  if (status != cudaSuccess) return status;
  done = plan.cluster == 1 ||
         ResidentClusters(kernel, plan.threads(), plan.shared_bytes, plan.cluster) > 0;
  if (!done) return cudaSuccess;
  const std::int64_t blocks = CeilDiv(args.shape.rows, std::int64_t{plan.step} * plan.rounds) *
                              (plan.step / plan.teams) * plan.cluster;
  const std::int64_t y = std::min(args.shape.groups, kMaxGridY);
  const std::int64_t z = CeilDiv(args.shape.groups, y);
  if (blocks > std::numeric_limits<int>::max() || z > kMaxGridY) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(y),
                  static_cast<unsigned>(z));
  const Launch launch(stream, grid, plan.threads(), plan.shared_bytes, plan.cluster);
  return cudaLaunchKernelEx(&launch.config, kernel, args, plan);
}

template <typename T, bool kCentered>
cudaError_t Forward(cudaStream_t stream, LayerNormFwdArgs args) {
  if (args.shape.all_rows() == 0) return cudaSuccess;
  if (args.scale.group_stride == 0 && args.bias.group_stride == 0) {
    args.shape = {1, args.shape.all_rows(), args.shape.features};  // groups differ in parameters
  }
  const std::int64_t features = args.shape.features;
  const bool aligned = Aligned(args.x, args.residual, args.y, args.sum);
  const bool aligned_params = Aligned(args.scale.data, args.bias.data) &&
                              (args.shape.groups == 1 || features % kVec<T> == 0);
  RowTask task =
      TaskOf(args.shape, sizeof(T), args.residual == nullptr ? 1 : 2, aligned, aligned_params);
  task.rows = args.shape.rows;  // a block's rows are those of one group
  const ForwardPlan plan = ChooseForwardPlan(task, ForcedRowPlan());
  bool done = false;
  if (!plan.stream) {
    const auto launch = [&]<int P, Division kDivision>() {
      const auto with = [&]<typename ParamT>() {
        return LaunchForward<T, ParamT, P, kDivision, kCentered>(stream, args, plan, done);
      };
      return DispatchParam<T, kDivision, kCentered>(args.scale, args.bias, true, with);
    };
    const auto with_packs = [&]<Division kDivision>() {
      return plan.packs == 4 ? launch.template operator()<4, kDivision>()
                             : launch.template operator()<8, kDivision>();
    };
    const cudaError_t status =
        plan.division == Division::kFramed   ? launch.template operator()<4, Division::kFramed>()
        : plan.division == Division::kUneven ? with_packs.template operator()<Division::kUneven>()
                                             : with_packs.template operator()<Division::kEven>();
    if (done || status != cudaSuccess) return status;
  }
  return DispatchWidth<T>(aligned && aligned_params, features, [&]<int W>() {
    ForwardStreamKernel<T, W>
        <<<GridBlocks(args.shape.all_rows()), kStreamThreads, 0, stream>>>(args);
    return cudaGetLastError();
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

// How many blocks, or clusters, of a persistent kernel run at a time; 0: clusters, but none can.
template <typename Kernel>
cudaError_t CountResident(const BackwardPlan& plan, Kernel* kernel, std::int64_t& resident) {
  // As much shared memory as any plan takes, and that split of it and the L1 cache, as another one
  // makes multiprocessors idle between kernels.
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            CurrentDevice().shared_bytes - 4096);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
  if (status != cudaSuccess) return status;
  if (plan.cluster > 1) {
    resident = ResidentClusters(kernel, plan.threads(), plan.shared_bytes, plan.cluster);
    return cudaSuccess;
  }
  int count = 0;
  status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &count, kernel, plan.threads(), static_cast<std::size_t>(plan.shared_bytes));
  resident = std::int64_t{std::max(1, count)} * MultiprocessorCount();
  return status;
}

template <typename T, bool kCentered, bool kFromOutput>
cudaError_t Backward(cudaStream_t stream, const LayerNormBwdArgs& args) {
  using A = Accum<T>;
  const auto [groups, rows, features] = args.shape;
  ColumnSums wanted;
  wanted.Add(args.dscale);
  wanted.Add(args.dbias);
  if (args.shape.elements() == 0) return ZeroColumnSums(stream, wanted, groups, features);
  const bool aligned = Aligned(args.dy, args.x, args.dsum, args.dx, args.workspace);
  const bool aligned_params = Aligned(args.scale.data, args.bias.data);
  const BackwardPlan plan = ChooseBackwardPlan(
      TaskOf(args.shape, sizeof(T), args.dsum == nullptr ? 2 : 3, aligned, aligned_params),
      ForcedRowPlan());
  auto* const workspace = static_cast<A*>(args.workspace);
  std::int64_t resident = 0, slots = 1;

  const auto run = [&]<Division kDivision>() {
    auto* const kernel = &BackwardKernel<T, kDivision, kCentered, kFromOutput>;
    const cudaError_t status = CountResident(plan, kernel, resident);
    if (status != cudaSuccess || resident == 0) return status;
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
    const std::int64_t blocks = std::min(resident, groups * slots) * plan.cluster;
    const Launch launch(stream, dim3(static_cast<unsigned>(blocks)), plan.threads(),
                        plan.shared_bytes, plan.cluster);
    return cudaLaunchKernelEx(&launch.config, kernel, args, plan, Deal(plan, rows, slots, features),
                              sums);
  };
  if (!plan.stream) {
    // Here what it costs that rows may be uneven hardly shows.
    const cudaError_t status = plan.division == Division::kFramed
                                   ? run.template operator()<Division::kFramed>()
                                   : run.template operator()<Division::kUneven>();
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
