// The gradient of an embedding's table, CUDA.
//
// The occurrences (the rows of x) are sorted by table row. Then the work is a list of items: each
// table row comes after its occurrences. A warp takes kItems neighbouring items and a tile of the
// features. It adds occurrences to a sum in registers. At a table row it writes the sum, or zeros.
// So each distribution of the indices gives each warp the same work.
//
// A table row may have occurrences in several warps. Their sums are added up in order. A block adds
// the sums of its warps in shared memory. EmbeddingBackwardJoin adds the sums of several blocks.
#include <cooperative_groups.h>

#include <algorithm>
#include <cstdint>

#include "common/integers.h"
#include "cuda/common/launch.cuh"
#include "ops/embedding.h"

namespace gradops {
namespace {

constexpr char kOp[] = "embedding_bwd";
constexpr int kWarps = 4;
constexpr int kItems = 32;  // of a warp
constexpr int kBlockItems = kWarps * kItems;
constexpr int kUnroll = 4;   // occurrences that are loaded at a time
constexpr int kPerLane = 8;  // features
constexpr int kTile = 32 * kPerLane;
constexpr int kJoinWarps = 16;
constexpr int kShort = 8;                     // blocks
constexpr int kMostDigits = 512;              // of a pass of the sort, and threads of its blocks
constexpr std::int64_t kSortedByBlock = 512;  // occurrences, if there are few

// The sorted occurrences, and where the sums of blocks go.
struct Sorted {
  std::int64_t occurrences, table_rows, features;
  const std::int32_t* keys = nullptr;       // table rows, sorted; table_rows for an index of no row
  const std::int32_t* positions = nullptr;  // rows of x
  // For each block [features]: the sum of a row that an earlier block began and this block ends,
  // and the sum of a row that goes on in the next block.
  void *heads = nullptr, *tails = nullptr;
  std::int32_t* head_rows = nullptr;  // the row of `heads`, or -1

  __host__ __device__ std::int64_t items() const { return occurrences + table_rows + 1; }
  __host__ __device__ std::int64_t blocks() const { return CeilDiv(items(), kBlockItems); }
  __host__ __device__ std::int64_t tiles() const { return CeilDiv(features, kTile); }
};

// A radix sort of (table row, position) pairs, from the lowest digit on. Pairs keep their order if
// their digits are equal.
struct Sort {
  const std::int32_t* indices;
  const std::int32_t* first;  // the number of the first table row
  std::int64_t occurrences;
  std::int32_t table_rows;
  int passes, digit_bits;
  // Pass p writes the arrays p % 2.
  std::int32_t *keys[2], *positions[2];
  std::int32_t* counts;  // [blocks, kMostDigits]: of the digits in a block's part
};

// All blocks run at the same time. Each takes a part of the pairs.
__global__ void __launch_bounds__(kMostDigits)
    EmbeddingBackwardSort(const __grid_constant__ Sort sort) {
  constexpr unsigned kAll = 0xffffffffu;
  constexpr int kSortWarps = kMostDigits / 32;
  __shared__ std::int32_t of_warps[kSortWarps][kMostDigits];  // counts, then places
  __shared__ std::int32_t places[kMostDigits];  // of the block's next pair with a digit
  __shared__ std::int32_t totals[kSortWarps];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const std::int64_t n = sort.occurrences, blocks = gridDim.x;
  const std::int64_t each = RoundUp(CeilDiv(n, blocks), std::int64_t{kMostDigits});
  const std::int64_t begin = min(blockIdx.x * each, n), end = min(begin + each, n);
  const std::int32_t first_row = *sort.first;

  for (int pass = 0; pass < sort.passes; ++pass) {
    if (pass > 0) cooperative_groups::this_grid().sync();  // the last pass is written
    const std::int32_t* const keys = sort.keys[(pass + 1) % 2];
    const std::int32_t* const positions = sort.positions[(pass + 1) % 2];
    // Calls fn(pair, its key, its digit, the lanes with this digit). Lanes after the last pair call
    // it with the digit kMostDigits.
    const auto take = [&](std::int64_t i, const auto& fn) {
      std::int32_t key = 0;
      int digit = kMostDigits;
      if (i < end) {
        if (pass > 0) {
          key = __ldcg(keys + i);
        } else {
          const std::int64_t row = std::int64_t{sort.indices[i]} - first_row;
          const bool is_row = row >= 0 && row < sort.table_rows;
          key = is_row ? static_cast<std::int32_t>(row) : sort.table_rows;
        }
        digit = key >> (pass * sort.digit_bits) & ((1 << sort.digit_bits) - 1);
      }
      fn(key, digit, __match_any_sync(kAll, digit));
    };

    places[thread] = 0;
    __syncthreads();
    for (std::int64_t tile = begin; tile < end; tile += kMostDigits) {
      take(tile + thread, [&](std::int32_t, int digit, unsigned equal) {
        if (digit < kMostDigits && lane == __ffs(equal) - 1) {
          atomicAdd(&places[digit], __popc(equal));  // of integers: the order has no effect
        }
      });
    }
    __syncthreads();
    sort.counts[blockIdx.x * kMostDigits + thread] = places[thread];
    cooperative_groups::this_grid().sync();

    // The thread's digit: after all smaller digits, and after its pairs of the blocks before.
    std::int32_t before = 0, total = 0;
#pragma unroll 16
    for (int b = 0; b < static_cast<int>(blocks); ++b) {
      const std::int32_t count = __ldcg(sort.counts + b * kMostDigits + thread);
      if (b < static_cast<int>(blockIdx.x)) before += count;
      total += count;
    }
    std::int32_t up_to = total;
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t other = __shfl_up_sync(kAll, up_to, step);
      if (lane >= step) up_to += other;
    }
    if (lane == 31) totals[warp] = up_to;
    __syncthreads();
    for (int w = 0; w < warp; ++w) before += totals[w];
    places[thread] = before + up_to - total;

    for (std::int64_t tile = begin; tile < end; tile += kMostDigits) {
      for (auto& counts : of_warps) counts[thread] = 0;
      __syncthreads();
      take(tile + thread, [&](std::int32_t key, int digit, unsigned equal) {
        const int earlier = __popc(equal & ((1u << lane) - 1));
        if (digit < kMostDigits && earlier == 0) of_warps[warp][digit] = __popc(equal);
        __syncthreads();
        std::int32_t place = places[thread];
        for (auto& counts : of_warps) {
          const std::int32_t count = counts[thread];
          counts[thread] = place;
          place += count;
        }
        places[thread] = place;
        __syncthreads();
        if (digit == kMostDigits) return;
        const std::int64_t i = tile + thread, to = of_warps[warp][digit] + earlier;
        sort.keys[pass % 2][to] = key;
        sort.positions[pass % 2][to] =
            pass == 0 ? static_cast<std::int32_t>(i) : __ldcg(positions + i);
      });
      __syncthreads();
    }
  }
}

// The least i in [low, high] for which holds(i). It holds for high, and for all numbers after the
// least one. The lanes of `mask` search together. All of them have the same bounds.
template <int kLanes, typename Holds>
__device__ __forceinline__ std::int64_t Least(std::int64_t low, std::int64_t high,
                                              const Holds& holds) {
  const int lane = threadIdx.x % kLanes, shift = threadIdx.x % 32 - lane;
  constexpr unsigned kMask = kLanes == 32 ? 0xffffffffu : (1u << kLanes) - 1;
  while (__any_sync(0xffffffffu, low < high)) {
    const std::int64_t step = CeilDiv(high - low + 1, kLanes + 1);
    const std::int64_t i = low + (lane + 1) * step - 1;
    const unsigned found = __ballot_sync(0xffffffffu, i >= high || holds(i)) >> shift & kMask;
    if (low < high) {
      const int before = found == 0 ? kLanes : __ffs(found) - 1;
      if (found != 0) high = min(high, low + (before + 1) * step - 1);
      low = min(high, low + before * step);
    }
  }
  return low;
}

// Lane l of a warp has the features W * (l + 32 * q) + e of a tile, for e < W and q < kPerLane / W.
template <int W, typename A>
struct LaneFeatures {
  static constexpr int kParts = kPerLane / W;
  std::int64_t first;
  unsigned there = 0;  // bit q: whether the features of q exist

  __device__ __forceinline__ LaneFeatures(std::int64_t tile, std::int64_t features)
      : first(tile * kTile + W * static_cast<int>(threadIdx.x % 32)) {
#pragma unroll
    for (int q = 0; q < kParts; ++q) there |= (first + 32 * W * q < features ? 1u : 0u) << q;
  }

  template <typename T>
  struct alignas(W * sizeof(T)) Some {
    T v[W];
  };
  template <typename T>
  struct Loaded {
    Some<T> parts[kParts];

    __device__ __forceinline__ void AddTo(A (&sum)[kPerLane]) const {
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) sum[k] += static_cast<A>(parts[k / W].v[k % W]);
    }
  };

  template <typename T>
  __device__ __forceinline__ Loaded<T> Load(const T* row) const {
    Loaded<T> loaded{};
#pragma unroll
    for (int q = 0; q < kParts; ++q) {
      if (there >> q & 1) {
        loaded.parts[q] = *reinterpret_cast<const Some<T>*>(row + first + 32 * W * q);
      }
    }
    return loaded;
  }
  template <typename O>
  __device__ __forceinline__ void Store(O* row, const A (&values)[kPerLane]) const {
#pragma unroll
    for (int q = 0; q < kParts; ++q) {
      Some<O> some;
#pragma unroll
      for (int e = 0; e < W; ++e) some.v[e] = static_cast<O>(values[q * W + e]);
      if (there >> q & 1) *reinterpret_cast<Some<O>*>(row + first + 32 * W * q) = some;
    }
  }
};

// The part of a warp: occurrences [occurrence, end_occurrence) and the ends of rows [row, end_row).
struct Part {
  std::int64_t row, end_row, occurrence, end_occurrence;
  bool begun;  // whether `row` has occurrences before this part

  // Finds the part in the list of items. In the list, the end of a row comes after the occurrences
  // of the row. Suppose that i of the first n items are row ends. Then n - i items are occurrences,
  // and the last occurrence belongs to a row up to i. A binary search finds the least such i.
  __device__ __forceinline__ Part(const Sorted& in, std::int64_t item) {
    const std::int64_t n = min(item + (threadIdx.x % 32 < 16 ? 0 : kItems), in.items());
    const std::int64_t rows =
        Least<16>(max(std::int64_t{0}, n - in.occurrences), min(n, in.table_rows + 1),
                  [&](std::int64_t i) { return i >= n || in.keys[n - 1 - i] <= i; });
    row = __shfl_sync(0xffffffffu, rows, 0), end_row = __shfl_sync(0xffffffffu, rows, 16);
    occurrence = min(item, in.items()) - row;
    end_occurrence = min(item + kItems, in.items()) - end_row;
    begun = occurrence > 0 && row < in.table_rows && in.keys[occurrence - 1] == row;
  }
  // Whether all of it is the middle of one row.
  __device__ __forceinline__ bool IsMiddle() const { return begun && row == end_row; }
};

template <typename T, typename O, int W>
__global__ void __launch_bounds__(32 * kWarps)
    EmbeddingBackwardSums(const Sorted in, const T* x, O* dtable) {
  using A = Accum<T>;
  __shared__ A heads[kWarps][kTile], tails[kWarps][kTile];
  __shared__ bool middles[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t block = blockIdx.x / in.tiles(), tile = blockIdx.x % in.tiles();
  const LaneFeatures<W, A> features(tile, in.features);
  const Part part(in, block * kBlockItems + warp * kItems);
  A sum[kPerLane] = {};
  bool has_sum = part.begun;
  std::int64_t row = part.row;
  const auto keep = [&](A(&where)[kTile]) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) where[lane + 32 * k] = sum[k];
  };
  const auto end_rows_before = [&](std::int64_t end) {
    if (row >= end) return;
    if (has_sum) {
      if (part.begun && row == part.row) {
        keep(heads[warp]);
      } else if (row < in.table_rows) {
        features.Store(dtable + row * in.features, sum);
      }
#pragma unroll
      for (A& each : sum) each = 0;
      has_sum = false;
      ++row;
    }
    for (const std::int64_t last = min(end, in.table_rows); row < last; ++row) {
      features.Store(dtable + row * in.features, sum);
    }
    row = end;
  };
  const auto count = static_cast<int>(part.end_occurrence - part.occurrence);
  static_assert(kItems <= 32);
  std::int32_t key = 0, position = 0;  // of the lane's occurrence
  if (lane < count) {
    key = in.keys[part.occurrence + lane], position = in.positions[part.occurrence + lane];
  }
  for (int i = 0; i < count; i += kUnroll) {
    typename LaneFeatures<W, A>::template Loaded<T> values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::int64_t at = __shfl_sync(0xffffffffu, position, min(i + u, count - 1));
      values[u] = features.Load(x + at * in.features);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::int64_t next = __shfl_sync(0xffffffffu, key, min(i + u, count - 1));
      if (i + u < count) {
        end_rows_before(next);
        has_sum = true;
        values[u].AddTo(sum);
      }
    }
  }
  end_rows_before(part.end_row);
  if (has_sum) keep(tails[warp]);
  if (lane == 0) middles[warp] = part.IsMiddle();
  __syncthreads();

  // Adds the sums of a row up to the one of warp `last`. Returns whether an earlier block began it.
  const auto add_tails = [&](int last) {
    int from = max(last, 0);
    while (from > 0 && middles[from]) --from;
#pragma unroll
    for (A& each : sum) each = 0;
    for (int w = from; w <= last; ++w) {
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) sum[k] += tails[w][lane + 32 * k];
    }
    return last < 0 || (from == 0 && middles[0]);
  };
  const bool ends_begun = part.begun && part.end_row > part.row;
  const bool is_head = ends_begun && add_tails(warp - 1);
  if (ends_begun) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) sum[k] += heads[warp][lane + 32 * k];
    if (is_head) {
      features.Store(static_cast<A*>(in.heads) + block * in.features, sum);
    } else {
      features.Store(dtable + part.row * in.features, sum);
    }
  }
  if (tile == 0) {
    if (__syncthreads_or(is_head) == 0) {
      if (threadIdx.x == 0) in.head_rows[block] = -1;
    } else if (is_head && lane == 0) {
      in.head_rows[block] = static_cast<std::int32_t>(part.row);
    }
  }
  if (warp == kWarps - 1 && has_sum) {
    add_tails(warp);
    features.Store(static_cast<A*>(in.tails) + block * in.features, sum);
  }
}

// Rows with occurrences in several blocks of the kernel above. Each warp takes the row that one of
// these blocks ends. If the row is in many blocks, all warps share its sums.
template <typename A, typename O, int W>
__global__ void __launch_bounds__(32 * kJoinWarps)
    EmbeddingBackwardJoin(const Sorted in, O* dtable) {
  __shared__ A parts[kJoinWarps][kTile];
  __shared__ std::int64_t long_begins[kJoinWarps];  // -1: no long row
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const LaneFeatures<W, A> features(blockIdx.y, in.features);
  const std::int64_t first = std::int64_t{blockIdx.x} * kJoinWarps, own = first + warp;
  A sum[kPerLane];
  const auto add_tails = [&](std::int64_t from, std::int64_t to) {
#pragma unroll
    for (A& each : sum) each = 0;
#pragma unroll 4
    for (std::int64_t b = from; b < to; ++b) {
      features.Load(static_cast<const A*>(in.tails) + b * in.features).AddTo(sum);
    }
  };
  const auto finish = [&](std::int64_t block) {
    features.Load(static_cast<const A*>(in.heads) + block * in.features).AddTo(sum);
    features.Store(dtable + in.head_rows[block] * in.features, sum);
  };
  const std::int64_t row = own < in.blocks() ? in.head_rows[own] : -1;
  std::int64_t begin = -1;
  if (row >= 0) {
    const std::int64_t occurrence =
        Least<32>(0, in.occurrences, [&](std::int64_t i) { return in.keys[i] >= row; });
    begin = (occurrence + row) / kBlockItems;
    if (own - begin <= kShort) {
      add_tails(begin, own);
      finish(own);
      begin = -1;
    }
  }
  if (lane == 0) long_begins[warp] = begin;
  __syncthreads();
  for (int i = 0; i < kJoinWarps; ++i) {
    if (long_begins[i] < 0) continue;
    const std::int64_t each = CeilDiv(first + i - long_begins[i], kJoinWarps);
    const std::int64_t from = min(long_begins[i] + warp * each, first + i);
    add_tails(from, min(from + each, first + i));
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) parts[warp][lane + 32 * k] = sum[k];
    __syncthreads();
    if (warp == 0) {
      for (int w = 1; w < kJoinWarps; ++w) {
#pragma unroll
        for (int k = 0; k < kPerLane; ++k) sum[k] += parts[w][lane + 32 * k];
      }
      finish(first + i);
    }
    __syncthreads();
  }
}

// Takes parts of the workspace.
class Workspace {
 public:
  Workspace(void* memory, std::int64_t bytes) : next_(static_cast<char*>(memory)), left_(bytes) {}
  void* Take(std::int64_t bytes) {
    constexpr std::int64_t kAlignment = 256;
    void* const taken = next_;
    next_ += RoundUp(bytes, kAlignment), left_ -= RoundUp(bytes, kAlignment);
    return taken;
  }
  bool ok() const { return left_ >= 0; }

 private:
  char* next_;
  std::int64_t left_;
};

ffi::Error SortIndices(cudaStream_t stream, const EmbeddingBwdArgs& args, std::int64_t group,
                       Workspace& workspace, Sorted& sorted) {
  const std::int64_t count = args.shape.rows;
  if (count > std::numeric_limits<std::int32_t>::max() ||
      args.table_rows >= std::numeric_limits<std::int32_t>::max()) {
    return ffi::Error::InvalidArgument(std::string(kOp) + ": more than 2^31 indices or table rows");
  }
  constexpr int kMostDigitBits = 9;
  static_assert(1 << kMostDigitBits == kMostDigits);
  int bits = 1;
  while (args.table_rows >> bits != 0) ++bits;
  const int passes = static_cast<int>(CeilDiv(bits, kMostDigitBits));
  const std::int64_t blocks =
      std::clamp<std::int64_t>(CeilDiv(count, kSortedByBlock), 1, MultiprocessorCount());
  const auto take = [&](std::int64_t n) {
    return static_cast<std::int32_t*>(workspace.Take(n * std::int64_t{sizeof(std::int32_t)}));
  };
  const Sort sort{
      .indices = static_cast<const std::int32_t*>(args.indices) + group * count,
      .first =
          static_cast<const std::int32_t*>(args.numbers.data) + group * args.numbers.group_stride,
      .occurrences = count,
      .table_rows = static_cast<std::int32_t>(args.table_rows),
      .passes = passes,
      .digit_bits = static_cast<int>(CeilDiv(bits, passes)),
      .keys = {take(count), take(count)},
      .positions = {take(count), take(count)},
      .counts = take(blocks * kMostDigits),
  };
  if (!workspace.ok()) {
    return ffi::Error::InvalidArgument(std::string(kOp) + ": the workspace is too small");
  }
  sorted.keys = sort.keys[(passes - 1) % 2], sorted.positions = sort.positions[(passes - 1) % 2];
  void* arguments[] = {const_cast<Sort*>(&sort)};
  return ToError(kOp, cudaLaunchCooperativeKernel(
                          reinterpret_cast<const void*>(EmbeddingBackwardSort),
                          static_cast<unsigned>(blocks), kMostDigits, arguments, 0, stream));
}

template <typename T, typename O, int W>
ffi::Error Sum(cudaStream_t stream, const Sorted& sorted, const T* x, O* dtable) {
  const std::int64_t blocks = sorted.blocks() * sorted.tiles();
  if (blocks > std::numeric_limits<int>::max()) return ToError(kOp, cudaErrorInvalidValue);
  EmbeddingBackwardSums<T, O, W>
      <<<static_cast<unsigned>(blocks), 32 * kWarps, 0, stream>>>(sorted, x, dtable);
  const dim3 grid(GridBlocks(CeilDiv(sorted.blocks(), kJoinWarps)),
                  static_cast<unsigned>(sorted.tiles()));
  EmbeddingBackwardJoin<Accum<T>, O, W><<<grid, 32 * kJoinWarps, 0, stream>>>(sorted, dtable);
  return LastError(kOp);
}

template <typename T, typename O>
ffi::Error Backward(cudaStream_t stream, const EmbeddingBwdArgs& args, std::int64_t group) {
  const std::int64_t rows = args.shape.rows, features = args.shape.features;
  const T* const x = static_cast<const T*>(args.x) + group * rows * features;
  O* const dtable = static_cast<O*>(args.dtable.data) + group * args.table_rows * features;
  Sorted sorted{.occurrences = rows, .table_rows = args.table_rows, .features = features};
  Workspace workspace(args.workspace, args.shape.groups * args.partial_rows * features *
                                          std::int64_t{sizeof(Accum<T>)});
  const std::int64_t sums = sorted.blocks() * features * std::int64_t{sizeof(Accum<T>)};
  sorted.heads = workspace.Take(sums), sorted.tails = workspace.Take(sums);
  sorted.head_rows = static_cast<std::int32_t*>(
      workspace.Take(sorted.blocks() * std::int64_t{sizeof(std::int32_t)}));
  const ffi::Error error = SortIndices(stream, args, group, workspace, sorted);
  if (!error.success()) return error;
  return features % 4 == 0 ? Sum<T, O, 4>(stream, sorted, x, dtable)
                           : Sum<T, O, 1>(stream, sorted, x, dtable);
}

}  // namespace

ffi::Error EmbeddingBwd(cudaStream_t stream, const EmbeddingBwdArgs& args) {
  const std::int64_t elements = args.shape.groups * args.table_rows * args.shape.features;
  if (elements == 0) return ffi::Error::Success();
  if (args.shape.rows == 0) {
    return ToError(
        kOp, cudaMemsetAsync(args.dtable.data, 0,
                             static_cast<std::size_t>(elements * ByteWidthOf(args.dtable.dtype)),
                             stream));
  }
  return DispatchDtype(FloatTypes{}, kOp, args.dtype, [&]<typename T>() {
    using Results = std::conditional_t<std::is_same_v<T, double>, TypeList<double>,
                                       TypeList<float, Half, BFloat16>>;
    return DispatchDtype(Results{}, kOp, args.dtable.dtype, [&]<typename O>() {
      for (std::int64_t group = 0; group < args.shape.groups; ++group) {
        const ffi::Error error = Backward<T, O>(stream, args, group);
        if (!error.success()) return error;
      }
      return ffi::Error::Success();
    });
  });
}

}  // namespace gradops
