// Layer norm and RMS norm backward, CUDA. Formulas: common/math.h.
//
// Row layout: cuda/row_norm/backward_policy.h. A unit of threads is a warp, or the warps of one
// row. Each unit is persistent: it loops over rows (narrow rows: several per warp, backward.cuh).
// Each thread copies its part of the next rows to shared memory in advance (ring.cuh).
// Each block has a slot in a group (see policy.h). Column sums stay in registers over
// the rows; sums of dx stay in shared memory. They are added over units, then over slots
// (column_sum.cuh), in a fixed order. Traffic: dy, x and dsum (if given) are read. dx is written,
// and a partial row per block.
//
// Unaligned rows are accessed as in the forward pass; narrow ones: backward_narrow.cuh. For
// few rows a separate kernel beside the dx kernel computes the column sums (LaunchFewSums). It
// reads dy and x once more.
#include "cuda/row_norm/backward.cuh"

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "cuda/common/column_sum.cuh"
#include "cuda/row_norm/backward_narrow.cuh"
#include "cuda/row_norm/launch.cuh"
#include "cuda/row_norm/stream.cuh"

namespace gradops {
namespace {

// scratch: how many values the workspace holds.
template <typename T, int W>
cudaError_t BackwardStreamed(cudaStream_t stream, const RowNormBwdArgs& args, bool sums,
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

// Returns where `slots` blocks a group store sums. Directly in the results: wanted.count becomes 0.
template <typename A>
SlotSums<A> SumsOf(const RowNormBwdArgs& args, std::int64_t slots, ColumnSums& wanted) {
  const std::int64_t features = args.shape.features;
  auto* const workspace = static_cast<A*>(args.workspace);
  SlotSums<A> sums{{nullptr, nullptr, nullptr}, features, 0};
  const ParamGrad* const results[] = {&args.dscale, &args.dbias, &args.dresidual_bias};
  const bool at_once =
      slots == 1 && std::all_of(std::begin(results), std::end(results), [](const ParamGrad* g) {
        return g->data == nullptr || (g->dtype == kDtype<A> && Aligned(g->data));
      });
  int place = 0;
  for (int s = 0; s < 3; ++s) {
    void* const result = results[s]->data;
    if (result == nullptr) continue;
    sums.results[s] = at_once ? static_cast<A*>(result) : workspace + place++ * features;
  }
  if (at_once) {
    wanted.count = 0;  // no partial sums are left to add
  } else {
    sums.group_pitch = args.partial_rows * wanted.count * features;
    sums.slot_pitch = wanted.count * features;
  }
  return sums;
}

// Column sums of few rows, from dy and x. They need no dx, so this kernel starts beside the kernel
// before, if that allows it. Adding partial sums would have to wait for that kernel.
template <typename T, int W>
cudaError_t LaunchFewSums(cudaStream_t stream, const RowNormBwdArgs& args) {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(GridBlocks(CeilDiv(args.shape.features, kSumLanes * W)));
  config.blockDim = dim3(kSumLanes, kSumRows);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = KeepShared(attributes[0]) + StartEarly(attributes[1]);
  return cudaLaunchKernelEx(&config, &BackwardSumsKernel<T, W>, args,
                            static_cast<const Accum<T>*>(nullptr));
}

// Whether LaunchFewSums is faster: dy and x, read twice, must fit the L2 cache. If no row is usual,
// each block also reads all of x (FewDeltas; limit: kFewReads). Tests that force a plan get its
// kernel.
inline constexpr std::int64_t kFewBytes = std::int64_t{4} << 20,
                              kFewReads = std::int64_t{128} << 20;
bool FewRows(const RowNormBwdArgs& args, int element_bytes, int width) {
  const std::int64_t bytes = args.shape.elements() * element_bytes;
  const bool centers = args.centered && !args.from_output;
  const std::int64_t reads = bytes * CeilDiv(args.shape.features, kSumLanes * width);
  return ForcedRowPlan() == RowOverride{} && args.shape.groups == 1 && args.shape.rows > 1 &&
         args.shape.rows <= kFewRows && bytes <= kFewBytes && args.dresidual_bias.data == nullptr &&
         (!centers || (args.epsilon >= 0 && reads <= kFewReads));
}

template <typename T, bool kCentered, bool kFromOutput>
cudaError_t Backward(cudaStream_t stream, RowNormBwdArgs args) {
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
  const RowNormBwdArgs all = args;
  const int width = aligned && aligned_params && features % kVec<T> == 0 ? kVec<T> : 1;
  const bool few = !plan.stream && wanted.count > 0 && FewRows(args, sizeof(T), width);
  if (few) args.dscale = args.dbias = {}, wanted.count = 0;
  std::int64_t resident = 0, slots = 1;
  const A inverse_features = static_cast<A>(1.0 / static_cast<double>(features));

  const auto run = [&]<int P, Division kDivision>() {
    auto* const kernel = &BackwardKernel<T, P, kDivision, kCentered, kFromOutput>;
    const cudaError_t status =
        CountResident(kernel, plan.threads(), plan.shared_bytes, plan.cluster, resident);
    if (status != cudaSuccess || resident == 0) return status;
    const std::int64_t items = CeilDiv(rows, plan.unit_rows() * plan.units);
    slots = std::min(items, std::max<std::int64_t>(1, resident / groups));
    if (wanted.count > 0) slots = std::min(slots, args.partial_rows);
    const SlotSums<A> sums = SumsOf<A>(args, slots, wanted);
    const std::int64_t blocks = std::min(resident, groups * slots) * plan.cluster;
    const Launch launch(stream, dim3(static_cast<unsigned>(blocks)), plan.threads(),
                        plan.shared_bytes, plan.cluster);
    return cudaLaunchKernelEx(&launch.config, kernel, args, plan, Deal(plan, rows, slots), sums,
                              inverse_features);
  };
  const auto run_narrow = [&](const NarrowPlan& narrow) {
    auto* const kernel = &BackwardNarrowKernel<T, kCentered, kFromOutput>;
    const cudaError_t status =
        CountResident(kernel, narrow.threads(), narrow.shared_bytes, 1, resident);
    if (status != cudaSuccess) return status;
    const NarrowDeal deal =
        DealNarrow(narrow, args.shape, resident, wanted.count > 0 ? args.partial_rows : resident);
    slots = deal.slots;
    const SlotSums<A> sums = SumsOf<A>(args, slots, wanted);
    const std::int64_t blocks = std::min(resident, groups * slots);
    const Launch launch(stream, dim3(static_cast<unsigned>(blocks)), narrow.threads(),
                        narrow.shared_bytes, 1);
    return cudaLaunchKernelEx(&launch.config, kernel, args, narrow, deal, sums, inverse_features);
  };
  if (!plan.stream) {
    // Even rows use the code for uneven rows too: here that costs hardly any time.
    constexpr int kMore = MorePacks(sizeof(T));
    const NarrowPlan narrow = plan.division == Division::kFramed
                                  ? ChooseNarrowPlan(task, NarrowBackwardExtra(task))
                                  : NarrowPlan{};
    const cudaError_t status =
        narrow.lanes > 0 ? run_narrow(narrow)
        : plan.division == Division::kFramed
            ? plan.packs == kFewPacks ? run.template operator()<kFewPacks, Division::kFramed>()
                                      : run.template operator()<kFramedPacks, Division::kFramed>()
        : plan.packs == kFewPacks ? run.template operator()<kFewPacks, Division::kUneven>()
                                  : run.template operator()<kMore, Division::kUneven>();
    if (status != cudaSuccess) return status;
  }
  if (resident == 0) {
    const std::int64_t scratch = groups * args.partial_rows * wanted.count * features;
    const cudaError_t status = DispatchWidth<T>(aligned && aligned_params, features, [&]<int W>() {
      return BackwardStreamed<T, W>(stream, args, wanted.count > 0, scratch);
    });
    if (status != cudaSuccess || !few) return status;
  }
  if (few) {
    return DispatchWidth<T>(aligned && aligned_params, features,
                            [&]<int W>() { return LaunchFewSums<T, W>(stream, all); });
  }
  if (wanted.count == 0) return cudaSuccess;
  return LaunchColumnSum<A>(stream, static_cast<const A*>(args.workspace), wanted, groups,
                            args.partial_rows, slots, features);
}

}  // namespace

ffi::Error RowNormBwd(CudaContext stream, const RowNormBwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "row_norm_bwd", args.dtype, [&]<typename T>() {
    const auto run =
        args.centered ? (args.from_output ? &Backward<T, true, true> : &Backward<T, true, false>)
                      : (args.from_output ? &Backward<T, false, true> : &Backward<T, false, false>);
    return ToError("row_norm_bwd", run(stream, args));
  });
}

}  // namespace gradops
