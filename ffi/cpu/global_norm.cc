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

constexpr std::int64_t CeilDiv(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

template <typename T>
using Wide = std::conditional_t<sizeof(T) == 2, float, T>;  // in which a T is exact

// Adds the squares of x[0, n) to the lanes; n is a multiple of kLanes.
template <typename A, typename W>
inline void AddSquares(const W* x, std::int64_t n, A (&lanes)[kLanes]) {
  for (std::int64_t i = 0; i < n; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) {
      const auto value = static_cast<A>(x[i + k]);
      lanes[k] += value * value;
    }
  }
}

// The same for 16-bit floats, in blocks that are widened first: 8 squares are summed in float; see
// MaxFloatSum. n is a multiple of kBlock.
constexpr std::int64_t kBlock = 8 * kLanes;
template <typename T>
inline void AddSquaresOf16Bit(const T* x, std::int64_t n, float max_float_sum,
                              double (&lanes)[kLanes]) {
  for (std::int64_t i = 0; i < n; i += kBlock) {
    float block[kBlock];
    for (int k = 0; k < kBlock; ++k) block[k] = static_cast<float>(x[i + k]);
    float sums[kLanes] = {};
    AddSquares(block, kBlock, sums);
    float all = 0;
    for (const float sum : sums) all += sum;
    if (all >= kMinFloatSum && all <= max_float_sum) {
      for (int k = 0; k < kLanes; ++k) lanes[k] += static_cast<double>(sums[k]);
    } else {
      AddSquares(block, kBlock, lanes);
    }
  }
}

template <typename T>
double SumOfSquaresOf(const T* x, std::int64_t n, float max_float_sum) {
  double lanes[kLanes] = {};
  constexpr std::int64_t kStep = sizeof(T) == 2 ? kBlock : kLanes;
  const std::int64_t whole = n / kStep * kStep;
  if constexpr (sizeof(T) == 2) {
    AddSquaresOf16Bit(x, whole, max_float_sum, lanes);
  } else {
    AddSquares(x, whole, lanes);
  }
  for (std::int64_t i = whole; i < n; ++i) {
    const auto value = static_cast<double>(static_cast<Wide<T>>(x[i]));
    lanes[(i - whole) % kLanes] += value * value;
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

// The leaves of a group as one array.
class Concatenation {
 public:
  explicit Concatenation(const SumOfSquaresArgs& args)
      : leaves_(args.leaves), max_float_sum_(MaxFloatSum(args.dtype)) {
    ends_.reserve(leaves_.size());
    for (const Leaf& leaf : leaves_) ends_.push_back(size() + leaf.count);
  }

  std::int64_t size() const { return ends_.empty() ? 0 : ends_.back(); }

  // The sum of squares of the group's elements [begin, end).
  double SumOfSquares(std::int64_t group, std::int64_t begin, std::int64_t end) const {
    double sum = 0;
    auto i = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) -
                                      ends_.begin());
    for (; begin < end; ++i) {
      const Leaf& leaf = leaves_[i];
      const std::int64_t here = std::min(end, ends_[i]);
      const std::int64_t offset = group * leaf.count + begin - (ends_[i] - leaf.count);
      const auto add = [&]<typename T>() {
        sum +=
            SumOfSquaresOf(static_cast<const T*>(leaf.data) + offset, here - begin, max_float_sum_);
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
  const float max_float_sum_;
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
  const Concatenation elements(args);
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
