// GELU and bias + GELU on the CPU. Formulas and source: common/gelu.h.
//
// The arrays are cut into tiles of columns and rows. The shape alone decides how. Elements are
// widened and rounded in registers. Rows of few features are joined: several of them count as one
// long row with repeated bias.
//
// Memory traffic: forward reads x and writes y. Backward reads dy and x and writes dx. Each tile
// also sums its rows' dx on the stack, one partial row per chunk of rows (cpu/column_sum.h).
#include "ops/bias_gelu.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "common/gelu.h"
#include "common/integers.h"
#include "cpu/column_sum.h"
#include "cpu/formulas.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"

namespace gradops {

namespace {

constexpr std::int64_t kTileColumns = 2048;  // a tile's row and its sums stay in L1
constexpr std::int64_t kShortRow = 256;      // shorter rows are joined
constexpr std::int64_t kMaxChunks = 64;      // of rows, per group

// How one call is cut into tiles: [groups, row_chunks, column_tiles]. A row here is a joined row of
// `join` rows of x. The last joined row of a group may be shorter.
struct Tiling {
  std::int64_t groups, group_elements;
  std::int64_t columns;  // of a joined row
  std::int64_t rows, rows_per_chunk, row_chunks;
  std::int64_t tile, column_tiles;
  std::int64_t tiles() const { return groups * row_chunks * column_tiles; }
};

Tiling MakeTiling(const RowShape& shape, std::int64_t element_bytes, std::int64_t max_chunks) {
  Tiling t{};
  t.groups = shape.groups;
  t.group_elements = shape.rows * shape.features;
  const std::int64_t join =
      shape.features >= kShortRow ? 1 : std::min(shape.rows, kTileColumns / shape.features);
  t.columns = join * shape.features;
  t.rows = CeilDiv(shape.rows, join);
  t.column_tiles = CeilDiv(t.columns, kTileColumns);
  t.tile = CeilDiv(t.columns, t.column_tiles);
  t.tile = std::min(RoundUp(t.tile, 16), t.columns);
  t.column_tiles = CeilDiv(t.columns, t.tile);
  t.rows_per_chunk = RowsPerChunk(t.rows, t.tile * element_bytes, max_chunks);
  t.row_chunks = CeilDiv(t.rows, t.rows_per_chunk);
  return t;
}

// One tile of one chunk of rows.
struct Tile {
  std::int64_t group, chunk, column, columns;  // [column, column + columns) of a joined row
  std::int64_t row, rows;
};

// Calls body(tile) for all tiles. Small tiles share a task. `streamed`: bodies store past the
// caches.
template <typename Body>
void ForEachTile(const CpuContext& pool, const Tiling& t, std::int64_t element_bytes, bool streamed,
                 const Body& body) {
  const std::int64_t tile_bytes = std::min(t.rows_per_chunk, t.rows) * t.tile * element_bytes;
  const std::int64_t per_task = RowsPerChunk(t.tiles(), tile_bytes, t.tiles());
  ParallelFor(pool, CeilDiv(t.tiles(), per_task), [&](std::int64_t task) {
    const std::int64_t end = std::min((task + 1) * per_task, t.tiles());
    for (std::int64_t i = task * per_task; i < end; ++i) {
      const std::int64_t column = i % t.column_tiles * t.tile;
      const std::int64_t chunk = i / t.column_tiles % t.row_chunks;
      const std::int64_t row = chunk * t.rows_per_chunk;
      body(Tile{.group = i / t.column_tiles / t.row_chunks,
                .chunk = chunk,
                .column = column,
                .columns = std::min(t.tile, t.columns - column),
                .row = row,
                .rows = std::min(t.rows_per_chunk, t.rows - row)});
    }
    if (streamed) StreamFence();
  });
}

// Calls body(offset, n) for each row of a tile: n elements of x from `offset` on. They begin at
// column tile.column of their joined row.
template <typename Body>
void ForEachRow(const Tiling& t, const Tile& tile, const Body& body) {
  for (std::int64_t row = tile.row; row < tile.row + tile.rows; ++row) {
    const std::int64_t in_group = row * t.columns + tile.column;
    const std::int64_t columns = std::min(tile.columns, t.group_elements - in_group);
    body(tile.group * t.group_elements + in_group, columns);
  }
}

// A tile's part of the bias, along a joined row. Without a bias: zeros.
template <typename A>
class TileBias {
 public:
  TileBias(const Param& bias, std::int64_t features, const Tile& tile) {
    if (bias.data == nullptr) {
      static constexpr std::array<A, kTileColumns> kZeros{};
      data_ = kZeros.data();
      return;
    }
    const A* const data = static_cast<const A*>(bias.data) + tile.group * bias.group_stride;
    if (tile.column + tile.columns <= features) {
      data_ = data + tile.column;
    } else {  // a joined row is a single tile
      for (std::int64_t c = 0; c < tile.columns; c += features) {
        std::copy_n(data, features, repeated_ + c);
      }
    }
  }
  const A* data() const { return data_; }

 private:
  A repeated_[kTileColumns];
  const A* data_ = repeated_;
};

// Computes a tile's part of a row: out = gelu(x + bias), or, with dy, out = dy gelu'(x + bias). out
// may overwrite dy. Backward also adds out to `sums`, unless `sums` is null. Stores go past the
// caches if `streamed`. See gelu::LimitOf for `strict`.
//
// A processor has too few turns of a long formula under way to be busy all the time. So each half
// of the formula has its own loop, in which two registers go side by side. The tanh form in float32
// has three loops: the argument of the exponential, the exponential, the rest. The last loop reads
// x again, because each store would take the time of a product. No other form gains from a third
// loop. Nanoseconds per element of rows in the L1 cache, with AVX2 on an EPYC (right columns:
// another day):
//                             one loop  two loops              two loops  three loops
//   float32 tanh, forward     0.76      0.58                   0.63       0.58
//   float32 tanh, backward    1.04      0.73                   0.79       0.72
//   float32 exact, forward    0.73      0.65
//   float32 exact, backward   0.95      0.78
template <typename T, bool kApproximate, bool kBackward>
void ComputeRow(const T* x, const Accum<T>* bias, const T* dy, std::int64_t n, T* out,
                Accum<T>* sums, bool streamed, bool strict) {
  using A = Accum<T>;
  const A limit = gelu::LimitOf<T, kApproximate, kBackward>(strict);
  // Slow rounding has a loop of its own, too. Backward in bfloat16 rounds slowly.
  constexpr bool kRoundsFast = !(kBackward && std::is_same_v<T, BFloat16>) &&
                               requires(T* to, lanes::Vector<A> v) { lanes::Narrow(to, v); };
  constexpr std::int64_t kBlock = 256;
  constexpr int kCount = 2 * lanes::kWidth<A>;
  using V = Lanes<A, kCount>;
  using Tail = decltype(GeluTail<T, kApproximate>(V()));
  constexpr bool kThreeLoops = kApproximate && std::is_same_v<T, float>;
  alignas(64) A tail_x[kBlock], tail_a[kBlock], tail_3[kBlock], tail_4[kBlock];
  for (std::int64_t start = 0; start < n; start += kBlock) {
    const std::int64_t count = std::min(kBlock, n - start);
    const T *const from = x + start, *const from_dy = kBackward ? dy + start : nullptr;
    T* const to = out + start;
    A* const to_sums = sums == nullptr ? nullptr : sums + start;
    const bool past = streamed && reinterpret_cast<std::uintptr_t>(to) % 64 == 0;
    const auto x_at = [=](auto at) -> V {
      return gelu::NanBeyond<kBackward>(limit, at(from) + at(bias + start));
    };
    ForWholeLanes<kCount>(count, [&](auto at) {
      constexpr std::int64_t kAhead = 4096 / sizeof(T);
      at.PrefetchToL1(from, kAhead);
      if constexpr (kBackward) at.PrefetchToL1(from_dy, kAhead);
      if (!past) at.PrefetchToStore(to, kAhead);
      const AtLanes<kCount> here{at.i};
      if constexpr (kThreeLoops) {
        const V a = gelu::LogisticMagnitude<A>(x_at(at));
        const auto [f, bits] = gelu::LogisticReduced<A>(a, a * a);
        here.Store(tail_3, f), here.Store(tail_4, FromBits(bits));
      } else {
        const auto [x_here, a, third, fourth] = GeluTail<T, kApproximate>(x_at(at));
        here.Store(tail_x, x_here), here.Store(tail_a, a);
        here.Store(tail_3, third), here.Store(tail_4, fourth);
      }
    });
    if constexpr (kThreeLoops) {
      for (std::int64_t i = 0; i < count; i += kCount) {
        const AtLanes<kCount> here{i};
        here.Store(tail_4, gelu::Exp2<A>(here(tail_3), Bits(here(tail_4))));
      }
    }
    const auto tail_at = [&](auto at) -> Tail {
      const AtLanes<kCount> here{at.i};
      if constexpr (kThreeLoops) {
        const V x_here = x_at(at), a = gelu::LogisticMagnitude<A>(x_here);
        return {x_here, a, a * a, here(tail_4)};
      } else {
        return {here(tail_x), here(tail_a), here(tail_3), here(tail_4)};
      }
    };
    const auto put = [&](auto at, const auto& result) {
      if (past) {
        at.Stream(to, result);
      } else {
        at.Store(to, result);
      }
      if (to_sums != nullptr) at.Store(to_sums, at(to_sums) + result);
    };
    ForWholeLanes<kCount>(count, [&](auto at) {
      const Tail tail = tail_at(at);
      V result;
      if constexpr (kBackward) {
        result = at(from_dy) * GeluDerivative<T, kApproximate>(tail);
      } else {
        result = Gelu<T, kApproximate>(tail);
      }
      if constexpr (kRoundsFast) {
        put(at, result);
      } else {
        AtLanes<kCount>{at.i}.Store(tail_x, result);
      }
    });
    if constexpr (!kRoundsFast) {
      ForWholeLanes<kCount>(count, [&](auto at) { put(at, AtLanes<kCount>{at.i}(tail_x)); });
    }
  }
}

// A shape for the same arrays with few groups and long rows, if rows are not summed.
RowShape Flatten(const RowShape& shape, const Param& bias) {
  if (bias.data == nullptr || (shape.rows == 1 && bias.group_stride == shape.features)) {
    return {1, 1, shape.elements()};
  }
  return bias.group_stride == 0 ? RowShape{1, shape.all_rows(), shape.features} : shape;
}

template <typename T, bool kApproximate>
void Forward(const CpuContext& pool, const BiasGeluFwdArgs& args) {
  using A = Accum<T>;
  const RowShape shape = Flatten(args.shape, args.bias);
  const T* const x = static_cast<const T*>(args.x);
  T* const y = static_cast<T*>(args.y);
  const bool streamed = PrepareResult(y, shape.elements() * std::int64_t{sizeof(T)}, {x});
  const Tiling t = MakeTiling(shape, 2 * sizeof(T), shape.rows);
  ForEachTile(pool, t, 2 * sizeof(T), streamed, [&](const Tile& tile) {
    const TileBias<A> bias(args.bias, shape.features, tile);
    ForEachRow(t, tile, [&](std::int64_t offset, std::int64_t n) {
      ComputeRow<T, kApproximate, false>(x + offset, bias.data(), nullptr, n, y + offset, nullptr,
                                         streamed, args.strict);
    });
  });
}

// Stores the sums of a tile's columns for x's own rows. In a joined row, a feature has several
// columns: their sums are added up in order.
template <typename A>
void StoreSums(double* totals, std::int64_t features, const Tile& tile, A* out) {
  const std::int64_t own = std::min(tile.columns, features - tile.column);
  for (std::int64_t c = own; c < tile.columns; c += own) {
    for (std::int64_t i = 0; i < own; ++i) totals[i] += totals[c + i];
  }
  for (std::int64_t i = 0; i < own; ++i) out[tile.column + i] = static_cast<A>(totals[i]);
}

template <typename T, bool kApproximate>
void Backward(const CpuContext& pool, const BiasGeluBwdArgs& args) {
  using A = Accum<T>;
  const bool wants_sums = args.dbias != nullptr;
  const RowShape shape = wants_sums ? args.shape : Flatten(args.shape, args.bias);
  const T* const dy = static_cast<const T*>(args.dy);
  const T* const x = static_cast<const T*>(args.x);
  T* const dx = static_cast<T*>(args.dx);
  A* const dbias = static_cast<A*>(args.dbias);
  A* const workspace = static_cast<A*>(args.workspace);
  const std::int64_t max_chunks = wants_sums ? std::min(args.partial_rows, kMaxChunks) : shape.rows;
  const bool streamed = PrepareResult(dx, shape.elements() * std::int64_t{sizeof(T)}, {dy, x});
  const Tiling t = MakeTiling(shape, 3 * sizeof(T), max_chunks);
  ForEachTile(pool, t, 3 * sizeof(T), streamed, [&](const Tile& tile) {
    const TileBias<A> bias(args.bias, shape.features, tile);
    A sums[kTileColumns];
    double totals[kTileColumns];
    if (wants_sums) {
      std::fill_n(sums, tile.columns, A{0});
      std::fill_n(totals, tile.columns, 0.0);
    }
    Tile part = tile;
    for (; part.row < tile.row + tile.rows; part.row += kRowsPerSum) {
      part.rows = std::min(kRowsPerSum, tile.row + tile.rows - part.row);
      ForEachRow(t, part, [&](std::int64_t offset, std::int64_t n) {
        ComputeRow<T, kApproximate, true>(x + offset, bias.data(), dy + offset, n, dx + offset,
                                          wants_sums ? sums : nullptr, streamed, args.strict);
      });
      if (wants_sums) MoveSums(sums, tile.columns, totals);
    }
    if (!wants_sums) return;
    A* const rows = t.row_chunks == 1 ? dbias + tile.group * shape.features
                                      : workspace + (tile.group * args.partial_rows + tile.chunk) *
                                                        shape.features;
    StoreSums(totals, shape.features, tile, rows);
  });
  if (!wants_sums || t.row_chunks == 1) return;
  for (std::int64_t group = 0; group < shape.groups; ++group) {
    AddPartialRows(workspace + group * args.partial_rows * shape.features, t.row_chunks,
                   shape.features, shape.features, dbias + group * shape.features);
  }
}

}  // namespace

ffi::Error BiasGeluFwd(CpuContext pool, const BiasGeluFwdArgs& args) {
  if (args.shape.elements() == 0) return ffi::Error::Success();
  return DispatchDtype(FloatTypes{}, "bias_gelu_fwd", args.dtype, [&]<typename T>() {
    args.approximate ? Forward<T, true>(pool, args) : Forward<T, false>(pool, args);
    return ffi::Error::Success();
  });
}

ffi::Error BiasGeluBwd(CpuContext pool, const BiasGeluBwdArgs& args) {
  if (args.shape.elements() == 0) {
    if (args.dbias != nullptr) {
      const std::int64_t sums = args.shape.groups * args.shape.features;
      std::memset(args.dbias, 0,
                  static_cast<std::size_t>(sums * ByteWidthOf(AccumDtype(args.dtype))));
    }
    return ffi::Error::Success();
  }
  return DispatchDtype(FloatTypes{}, "bias_gelu_bwd", args.dtype, [&]<typename T>() {
    args.approximate ? Backward<T, true>(pool, args) : Backward<T, false>(pool, args);
    return ffi::Error::Success();
  });
}

}  // namespace gradops
