// Softmax cross-entropy on the CPU.
//
// Rows are shared out among threads. Forward takes a row block by block. It looks for the block's
// largest logit, and then adds up the exponentials while the block is in the L1 cache. Memory
// traffic: forward reads x; backward reads x and writes dx, which may be x.
#include "ops/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/exponential.h"
#include "common/integers.h"
#include "cpu/formulas.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"
#include "cpu/stream.h"

namespace gradops {
namespace {

using gelu::MulAdd;  // for one number; that for lanes is found, too

template <typename A>
constexpr A kInfinity = std::numeric_limits<A>::infinity();

// x times this overflows where exp(x) does, for x >= 0.
template <typename A>
constexpr A kOverflow = std::numeric_limits<A>::max() /
                        (std::is_same_v<A, double> ? A(709.782712893384) : A(88.72284f));

// What is subtracted from logits: the largest one. It is 0 instead of an infinity, because the
// difference of infinities is NaN.
template <typename A>
A Base(A largest) {
  return std::isinf(largest) ? A{0} : largest;
}

template <typename A>
struct RowNumbers {
  A largest = -kInfinity<A>;
  A total = 0;        // of exp(x - Base(largest)): NaN if a logit is NaN
  A differences = 0;  // the sum of x - origin
};

// The largest of n logits, without NaN; -inf for none.
template <typename T>
Accum<T> LargestOf(const T* x, std::int64_t n) {
  using A = Accum<T>;
  using F = Lanes<A>;
  F lanes(-kInfinity<A>);
  A values[kLanes<A>];
  std::int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) lanes = Max(LoadLanes<kLanes<A>>(x + i), lanes);
  StoreLanes(values, lanes);
  A largest = -kInfinity<A>;
  for (const A value : values) largest = Max(value, largest);
  for (; i < n; ++i) largest = Max(static_cast<A>(x[i]), largest);
  return largest;
}

template <bool kDifferences, typename T>
RowNumbers<Accum<T>> NumbersOf(const T* x, std::int64_t n, Accum<T> origin) {
  using A = Accum<T>;
  constexpr std::int64_t kBlock = 4096;
  RowNumbers<A> row;
  for (std::int64_t start = 0; start < n; start += kBlock) {
    const std::int64_t count = std::min(kBlock, n - start);
    const A largest = LargestOf(x + start, count);
    if (largest > row.largest) {
      row.total *= std::exp(row.largest - largest);
      row.largest = largest;
    }
    const A base = Base(row.largest);
    const auto sums = LaneSums<A, 1 + kDifferences>(count, [=](auto at) {
      const auto some = at(x + start);
      using F = std::remove_const_t<decltype(some)>;
      std::array<F, 1 + kDifferences> terms{gelu::ExpOfNegative<A>(some - F(base))};
      if constexpr (kDifferences) terms[1] = some - F(origin);
      return terms;
    });
    row.total += sums[0];
    if constexpr (kDifferences) row.differences += sums[1];
  }
  if (row.largest == kInfinity<A>) {  // ExpOfNegative does not take differences above 0
    const bool has_nan =
        std::any_of(x, x + n, [](T each) { return std::isnan(static_cast<A>(each)); });
    row.total = has_nan ? std::numeric_limits<A>::quiet_NaN() : kInfinity<A>;
  }
  return row;
}

// The column of a row's label, which is outside [0, features) for a label of another shard.
std::int64_t ColumnOf(std::int32_t label, const Param& classes, std::int64_t group) {
  return std::int64_t{label} -
         static_cast<const std::int32_t*>(classes.data)[group * classes.group_stride];
}

// Calls body(row) for all rows. Short rows share a task.
template <typename Body>
void ForEachRow(const CpuContext& pool, const RowShape& shape, std::int64_t element_bytes,
                const Body& body) {
  constexpr std::int64_t kTaskBytes = 1 << 16;
  const std::int64_t rows = shape.all_rows();
  const std::int64_t per_task =
      CeilDiv(kTaskBytes, std::max<std::int64_t>(1, shape.features * element_bytes));
  ParallelFor(pool, CeilDiv(rows, per_task), [&](std::int64_t task) {
    const std::int64_t end = std::min((task + 1) * per_task, rows);
    for (std::int64_t row = task * per_task; row < end; ++row) body(row);
  });
}

template <typename T, bool kDifferences>
void Forward(const CpuContext& pool, const CrossEntropyFwdArgs& args) {
  using A = Accum<T>;
  const std::int64_t features = args.shape.features;
  ForEachRow(pool, args.shape, sizeof(T), [&](std::int64_t row) {
    const T* const x = static_cast<const T*>(args.x) + row * features;
    const std::int32_t label = static_cast<const std::int32_t*>(args.labels)[row];
    RowNumbers<A> numbers{0, 1, 0};
    A logit = 0, origin = 0;
    if (label != kIgnoredLabel) {
      if (kDifferences && features > 0) origin = static_cast<A>(x[0]);
      if (!std::isfinite(origin)) origin = 0;
      numbers = NumbersOf<kDifferences>(x, features, origin);
      if (features > 0) {
        const std::int64_t column = ColumnOf(label, args.classes, row / args.shape.rows);
        if (column >= 0 && column < features) logit = static_cast<A>(x[column]);
      }
      numbers.differences += static_cast<A>(features) * (origin - Base(numbers.largest));
    }
    static_cast<A*>(args.largest)[row] = numbers.largest;
    static_cast<A*>(args.total)[row] = numbers.total;
    static_cast<A*>(args.logit_of_label)[row] = logit;
    if (kDifferences) static_cast<A*>(args.sum_of_differences)[row] = numbers.differences;
  });
}

template <typename T>
void Backward(const CpuContext& pool, const CrossEntropyBwdArgs& args) {
  using A = Accum<T>;
  const std::int64_t features = args.shape.features;
  const std::int64_t bytes = args.shape.elements() * std::int64_t{sizeof(T)};
  const bool streamed = PrepareResult(args.dx, bytes, {args.x});
  ForEachRow(pool, args.shape, sizeof(T), [&](std::int64_t row) {
    const auto number = [row](const void* numbers) {
      return numbers == nullptr ? A{0} : static_cast<const A*>(numbers)[row];
    };
    const T* const x = static_cast<const T*>(args.x) + row * features;
    T* const dx = static_cast<T*>(args.dx) + row * features;
    const std::int32_t label = static_cast<const std::int32_t*>(args.labels)[row];
    if (label == kIgnoredLabel) {
      std::fill_n(dx, features, static_cast<T>(0.0f));
      return;
    }
    const A largest = number(args.largest), factor = number(args.factor);
    const A uniform = number(args.uniform);
    const std::int64_t column = ColumnOf(label, args.classes, row / args.shape.rows);
    const bool has_label = column >= 0 && column < features;
    const A logit = has_label ? static_cast<A>(x[column]) : A{0};
    // exponential(d) times factor is exp(d) times factor.
    const auto store = [&](const auto& exponential) {
      const auto derivative = [=](const auto& logits) {
        using F = std::remove_cvref_t<decltype(logits)>;
        return MulAdd(F(factor), exponential(logits - F(largest)), F(uniform));
      };
      StoreForLanes<kLanes<A>>(dx, features, streamed, [=](auto at) { return derivative(at(x)); });
      if (streamed) StreamFence();
      if (has_label) dx[column] = static_cast<T>(derivative(logit) + number(args.target));
    };
    if (factor == 0) {
      // In a row with a logit of +inf, largest is 0, and exponentials may overflow: 0 * inf is NaN.
      store([](const auto& d) {
        using F = std::remove_cvref_t<decltype(d)>;
        return Max(F(A{0}), d) * F(kOverflow<A>);
      });
    } else {
      store([](const auto& d) { return gelu::ExpOfNegative<A>(d); });
    }
  });
}

}  // namespace

ffi::Error CrossEntropyFwd(CpuContext pool, const CrossEntropyFwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "softmax_cross_entropy_fwd", args.dtype, [&]<typename T>() {
    args.sum_of_differences == nullptr ? Forward<T, false>(pool, args)
                                       : Forward<T, true>(pool, args);
    return ffi::Error::Success();
  });
}

ffi::Error CrossEntropyBwd(CpuContext pool, const CrossEntropyBwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "softmax_cross_entropy_bwd", args.dtype, [&]<typename T>() {
    if (args.shape.elements() > 0) Backward<T>(pool, args);
    return ffi::Error::Success();
  });
}

}  // namespace gradops
