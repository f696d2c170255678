// Sum of squares over many arrays, CPU.
//
// Within a group, the leaves are read as one long array, which is cut into at most kMaxPartialSums
// parts of equal size, whatever the number of threads. Each part is summed in double, in a fixed
// number of lanes; then the parts are summed in order. Memory traffic: one read of every leaf.
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "common/dtype.h"
#include "cpu/parallel.h"
#include "ops/global_norm.h"

namespace gradops {
namespace {

constexpr int kLanes = 16;
constexpr std::int64_t kMinPartElements = kMinChunkBytes / static_cast<std::int64_t>(sizeof(float));

constexpr std::int64_t CeilDiv(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

template <typename T>
auto Widen(T value) {
  if constexpr (sizeof(T) == 2) {
    return static_cast<float>(value);
  } else {
    return static_cast<double>(value);
  }
}

// Adds the squares of x[0, n) to the lanes; n is a multiple of kLanes.
template <typename A, typename T>
inline void AddSquares(const T* x, std::int64_t n, A (&lanes)[kLanes]) {
  for (std::int64_t i = 0; i < n; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) {
      const auto value = static_cast<A>(Widen(x[i + k]));
      lanes[k] += value * value;
    }
  }
}

// The same through sums of 8 squares in float, which is as good; see kSafeSumMin.
template <typename T>
inline void AddSquaresOf16Bit(const T* x, std::int64_t n, double (&lanes)[kLanes]) {
  constexpr std::int64_t kBlock = 8 * kLanes;
  std::int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    float sums[kLanes] = {};
    AddSquares(x + i, kBlock, sums);
    float all = 0;
    for (const float sum : sums) all += sum;
    if (all >= kSafeSumMin && all <= kSafeSumMax) {
      for (int k = 0; k < kLanes; ++k) lanes[k] += static_cast<double>(sums[k]);
    } else {
      AddSquares(x + i, kBlock, lanes);
    }
  }
  AddSquares(x + i, n - i, lanes);
}

template <typename T>
double SumOfSquaresOf(const T* x, std::int64_t n) {
  double lanes[kLanes] = {};
  const std::int64_t whole = n / kLanes * kLanes;
  if constexpr (sizeof(T) == 2) {
    AddSquaresOf16Bit(x, whole, lanes);
  } else {
    AddSquares(x, whole, lanes);
  }
  for (std::int64_t i = whole; i < n; ++i) {
    const auto value = static_cast<double>(Widen(x[i]));
    lanes[i - whole] += value * value;
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

// The leaves of a group as one array.
class Concatenation {
 public:
  explicit Concatenation(const std::vector<Leaf>& leaves) : leaves_(leaves) {
    ends_.reserve(leaves.size());
    for (const Leaf& leaf : leaves) ends_.push_back(size() + leaf.count);
  }

  std::int64_t size() const { return ends_.empty() ? 0 : ends_.back(); }

  // The sum of squares of the group's elements [begin, end).
  double SumOfSquares(std::int64_t group, std::int64_t begin, std::int64_t end) const {
    double sum = 0;
    auto i = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
    for (; begin < end; ++i) {
      const Leaf& leaf = leaves_[i];
      const std::int64_t here = std::min(end, ends_[i]);
      const std::int64_t offset = group * leaf.count + begin - (ends_[i] - leaf.count);
      const auto add = [&]<typename T>() {
        sum += SumOfSquaresOf(static_cast<const T*>(leaf.data) + offset, here - begin);
        return ffi::Error::Success();
      };
      // The handler has checked the dtype.
      static_cast<void>(DispatchDtype(FloatTypes{}, "sum_of_squares", leaf.dtype, add));
      begin = here;
    }
    return sum;
  }

 private:
  const std::vector<Leaf>& leaves_;
  std::vector<std::int64_t> ends_;
};

// Sums each group's partial sums, [groups, parts], in order.
template <typename A>
void Finalize(const SumOfSquaresArgs& args, const double* partials, std::int64_t parts) {
  for (std::int64_t group = 0; group < args.groups; ++group) {
    double sum = 0;
    for (std::int64_t part = 0; part < parts; ++part) sum += partials[group * parts + part];
    const RangedSum<A> result = Split<A>(sum);
    static_cast<A*>(args.huge)[group] = result.huge;
    static_cast<A*>(args.normal)[group] = result.normal;
    static_cast<A*>(args.tiny)[group] = result.tiny;
  }
}

}  // namespace

ffi::Error SumOfSquares(CpuContext pool, const SumOfSquaresArgs& args) {
  if (args.groups == 0) return ffi::Error::Success();
  const Concatenation elements(args.leaves);
  auto* const partials = static_cast<double*>(args.workspace);
  std::int64_t parts = 0;
  if (elements.size() > 0) {
    const std::int64_t room = std::min(kMaxPartialSums, args.workspace_doubles / args.groups);
    const std::int64_t part_size = std::max(kMinPartElements, CeilDiv(elements.size(), room));
    parts = CeilDiv(elements.size(), part_size);
    // Many small groups go to one thread together.
    const std::int64_t items = args.groups * parts;
    const std::int64_t items_per_chunk =
        std::max<std::int64_t>(1, kMinPartElements / std::min(part_size, elements.size()));
    ParallelFor(pool, CeilDiv(items, items_per_chunk), [&](std::int64_t chunk) {
      const std::int64_t first = chunk * items_per_chunk;
      for (std::int64_t item = first; item < std::min(items, first + items_per_chunk); ++item) {
        const std::int64_t begin = item % parts * part_size;
        const std::int64_t end = std::min(begin + part_size, elements.size());
        partials[item] = elements.SumOfSquares(item / parts, begin, end);
      }
    });
  }
  if (args.dtype == ffi::F64) {
    Finalize<double>(args, partials, parts);
  } else {
    Finalize<float>(args, partials, parts);
  }
  return ffi::Error::Success();
}

}  // namespace gradops
