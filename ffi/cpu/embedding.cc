// The gradient of an embedding's table on the CPU.
//
// The occurrences are sorted by table row, by counting. A task takes some table rows and adds up
// the occurrences of each, in order. Several tasks share a row with many occurrences: each has a
// tile of the features. Memory traffic: x is read once, dtable is written once.
#include "ops/embedding.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "common/dtype.h"
#include "common/integers.h"
#include "cpu/parallel.h"
#include "cpu/stream.h"

namespace gradops {
namespace {

constexpr std::int64_t kTile = 256;         // features
constexpr std::int64_t kWorkOfTask = 2048;  // table rows and occurrences
// So many occurrences are added up on their own: the error of long sums stays small.
constexpr std::int64_t kSummed = 128;

// The occurrences of each table row, in order: order[starts[row]] to order[starts[row + 1] - 1].
struct Occurrences {
  std::vector<std::int64_t> starts, order;

  Occurrences(const std::int32_t* indices, std::int64_t count, std::int64_t first,
              std::int64_t table_rows)
      : starts(static_cast<std::size_t>(table_rows) + 2) {
    const auto row_of = [=](std::int64_t i) {  // table_rows: of no row
      const std::int64_t row = std::int64_t{indices[i]} - first;
      return static_cast<std::size_t>(row < 0 || row >= table_rows ? table_rows : row);
    };
    for (std::int64_t i = 0; i < count; ++i) ++starts[row_of(i) + 1];
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    order.resize(static_cast<std::size_t>(count));
    std::vector<std::int64_t> next(starts.begin(), starts.end() - 1);
    for (std::int64_t i = 0; i < count; ++i) {
      order[static_cast<std::size_t>(next[row_of(i)]++)] = i;
    }
  }

  std::int64_t begin(std::int64_t row) const { return starts[static_cast<std::size_t>(row)]; }
  std::int64_t end(std::int64_t row) const { return begin(row + 1); }

  // The first row that has at least this much work before it.
  std::int64_t RowAfter(std::int64_t work) const {
    std::int64_t low = 0, high = static_cast<std::int64_t>(starts.size()) - 2;
    while (low < high) {
      const std::int64_t row = (low + high) / 2;
      if (row + begin(row) >= work) {
        high = row;
      } else {
        low = row + 1;
      }
    }
    return low;
  }
};

template <typename T, typename O>
void Backward(const CpuContext& pool, const EmbeddingBwdArgs& args, std::int64_t group) {
  using A = Accum<T>;
  const std::int64_t rows = args.shape.rows, features = args.shape.features;
  const T* const x = static_cast<const T*>(args.x) + group * rows * features;
  O* const dtable = static_cast<O*>(args.dtable.data) + group * args.table_rows * features;
  const std::int32_t first =
      static_cast<const std::int32_t*>(args.numbers.data)[group * args.numbers.group_stride];
  const Occurrences found(static_cast<const std::int32_t*>(args.indices) + group * rows, rows,
                          first, args.table_rows);
  const std::int64_t bytes = args.table_rows * features * std::int64_t{sizeof(O)};
  // The first store to a page of new memory leaves the page in the caches. Stores past the caches
  // would then take more than twice the time.
  const bool is_new = !IsResident(dtable, bytes);
  const bool streamed = PrepareResult(dtable, bytes, {args.x}) && !is_new;
  const std::int64_t tiles = CeilDiv(features, kTile);
  const auto write = [&](std::int64_t row, std::int64_t tile) {
    const std::int64_t begin = tile * kTile, size = std::min(kTile, features - begin);
    A total[kTile], part[kTile];
    std::fill_n(total, size, A{0});
    for (std::int64_t i = found.begin(row); i < found.end(row);) {
      std::fill_n(part, size, A{0});
      for (const std::int64_t stop = std::min(found.end(row), i + kSummed); i < stop; ++i) {
        const T* const some = x + found.order[static_cast<std::size_t>(i)] * features + begin;
        for (std::int64_t k = 0; k < size; ++k) part[k] += static_cast<A>(some[k]);
      }
      for (std::int64_t k = 0; k < size; ++k) total[k] += part[k];
    }
    O* const to = dtable + row * features + begin;
    if (!streamed) {
      for (std::int64_t k = 0; k < size; ++k)
        to[k] = static_cast<O>(static_cast<Accum<O>>(total[k]));
      return;
    }
    O result[kTile];
    for (std::int64_t k = 0; k < size; ++k)
      result[k] = static_cast<O>(static_cast<Accum<O>>(total[k]));
    StreamCopy(to, result, size * std::int64_t{sizeof(O)});
  };
  const std::int64_t work = args.table_rows + rows;
  ParallelFor(pool, CeilDiv(work, kWorkOfTask) * tiles, [&](std::int64_t task) {
    const std::int64_t from = task / tiles * kWorkOfTask, own = task % tiles;
    const std::int64_t last = found.RowAfter(from + kWorkOfTask);
    for (std::int64_t row = found.RowAfter(from); row < last; ++row) {
      const std::int64_t count = found.end(row) - found.begin(row);
      if (count > kSummed) {
        write(row, own);
      } else if (own != 0) {
        continue;  // the first task writes whole rows: memory is written in order
      } else if (count == 0 && !streamed) {
        std::fill_n(dtable + row * features, features, O{});
      } else {
        for (std::int64_t tile = 0; tile < tiles; ++tile) write(row, tile);
      }
    }
    if (streamed) StreamFence();
  });
}

}  // namespace

ffi::Error EmbeddingBwd(CpuContext pool, const EmbeddingBwdArgs& args) {
  constexpr char kOp[] = "embedding_bwd";
  if (args.table_rows == 0) return ffi::Error::Success();
  return DispatchDtype(FloatTypes{}, kOp, args.dtype, [&]<typename T>() {
    return DispatchDtype(FloatTypes{}, kOp, args.dtable.dtype, [&]<typename O>() {
      for (std::int64_t group = 0; group < args.shape.groups; ++group) {
        Backward<T, O>(pool, args, group);
      }
      return ffi::Error::Success();
    });
  });
}

}  // namespace gradops
