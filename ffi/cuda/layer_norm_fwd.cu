// Layer norm and RMS norm forward, CUDA.
//
// How rows are laid out on the chip: cuda/layer_norm_policy.h. A block per row (some rows, where
// they are narrow) loads it into registers, makes two passes over them in each warp, merges the
// warps' means and sums of squares (layer_norm_moments.cuh), and stores y. Traffic: x read, y
// written; with a residual, x and residual read, sum and y written.
//
// Rows that start anywhere are read and written by the 16 bytes too, from 16-byte boundary to
// 16-byte boundary, so that only a row's first and last few elements need care: see Place.
#include "cuda/layer_norm_fwd.cuh"

#include <algorithm>
#include <cstdint>

#include "cuda/layer_norm_launch.cuh"
#include "cuda/layer_norm_stream.cuh"

namespace gradops {

RowOverride& ForcedRowPlan() {
  static RowOverride forced{};
  return forced;
}

namespace {

// Calls fn.operator()<ParamT>(): what a forward kernel takes scale and bias for; void: for
// anything, or nothing. A residual's bias, too, is of that type, or there is none.
template <typename T, Division kDivision, bool kCentered, typename Fn>
cudaError_t DispatchParam(const LayerNormFwdArgs& args, const Fn& fn) {
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
// What a multiprocessor's blocks of more than a warp or two need; the GPU gives 16 KB.
constexpr int kLeastSharedBytes = 10 * 1024;

template <typename T, typename ParamT, int P, Division kDivision, bool kCentered>
cudaError_t LaunchForward(cudaStream_t stream, const LayerNormFwdArgs& args,
                          const ForwardPlan& plan, bool& done) {
  auto* const kernel = &ForwardKernel<T, ParamT, P, kDivision, kCentered>;
  constexpr bool kFramed = kDivision == Division::kFramed;
  const auto ask = [&](int& count) {
    cudaError_t status = cudaSuccess;
    if constexpr (kFramed) {
      status =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kFramedBytes);
    }
    // What is under way from memory needs a place in the L1 cache, and parameters shall stay there:
    // shared memory, of which blocks have little, gets no more than so much (in %).
    if (status == cudaSuccess) {
      const int least = 100 * kLeastSharedBytes / std::max(1, CurrentDevice().shared_bytes) + 1;
      status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    kFramed ? (sizeof(T) == 2 ? 75 : 40) : std::min(100, least));
    }
    count = plan.cluster == 1
                ? 1
                : ResidentClusters(kernel, plan.threads(), plan.shared_bytes, plan.cluster);
    return status;
  };
  int resident = 0;
  const cudaError_t status = Remembered(reinterpret_cast<const void*>(kernel), plan.threads(),
                                        plan.shared_bytes, plan.cluster, resident, ask);
  if (status != cudaSuccess) return status;
  done = resident > 0;
  if (!done) return cudaSuccess;
  const std::int64_t blocks = CeilDiv(args.shape.rows, std::int64_t{plan.step} * plan.rounds) *
                              (plan.step / plan.teams) * plan.cluster;
  const std::int64_t y = std::min(args.shape.groups, kMaxGridY);
  const std::int64_t z = CeilDiv(args.shape.groups, y);
  if (blocks > std::numeric_limits<int>::max() || z > kMaxGridY) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(y),
                  static_cast<unsigned>(z));
  const Launch launch(stream, grid, plan.threads(), plan.shared_bytes, plan.cluster);
  return cudaLaunchKernelEx(&launch.config, kernel, args, plan, ForwardScalars<Accum<T>>(args));
}

template <typename T, bool kCentered>
cudaError_t Forward(cudaStream_t stream, LayerNormFwdArgs args) {
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
  task.rows = args.shape.rows;  // a block's rows are those of one group
  const ForwardPlan plan = ChooseForwardPlan(task, ForcedRowPlan());
  bool done = false;
  if (!plan.stream) {
    const auto launch = [&]<int P, Division kDivision>() {
      const auto with = [&]<typename ParamT>() {
        return LaunchForward<T, ParamT, P, kDivision, kCentered>(stream, args, plan, done);
      };
      return DispatchParam<T, kDivision, kCentered>(args, with);
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

const char* NameOf(const LayerNormFwdArgs& args) {
  return args.centered ? "layer_norm_fwd" : "rms_norm_fwd";
}

}  // namespace

ffi::Error LayerNormFwd(CudaContext stream, const LayerNormFwdArgs& args) {
  return DispatchDtype(FloatTypes{}, NameOf(args), args.dtype, [&]<typename T>() {
    return ToError(NameOf(args), args.centered ? Forward<T, true>(stream, args)
                                               : Forward<T, false>(stream, args));
  });
}

}  // namespace gradops
