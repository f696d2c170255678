// The sum of squares of many arrays, and the scaling of many arrays in place, on the CPU.
//
// Within a group, the leaves are read as one long array. It is cut into parts of equal size. The
// number of threads does not matter. A sum has at most kMaxPartialSums parts. Each part is summed
// in double, in a fixed number of lanes. Then the parts are summed in order. Memory traffic: a sum
// reads every leaf once. Scaling reads and writes every leaf once, or does neither.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "common/dtype.h"
#include "common/integers.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"
#include "cpu/stream.h"
#include "ops/global_norm.h"

namespace gradops {
namespace {

constexpr int kSumLanes = 16;
constexpr std::int64_t kMinPartElements = kMinChunkBytes / static_cast<std::int64_t>(sizeof(float));

template <typename T>
using Wide = std::conditional_t<sizeof(T) == 2, float, T>;  // a T is exact in it

// Four blocks of kBlock elements: two at each of two places of an array. The places lie in the two
// halves of the array, which are read at the same time. GB/s on one core and on two cores:
//                   one place  two places    four places
//   Zen 5           47, 58     56, 62        20, 31
//   an older EPYC   20, 30     not measured  35, 41
template <typename T, int kBlock>
struct FourBlocks {
  const T* first;
  std::int64_t half;
  const T* operator[](int i) const { return first + i / 2 * half + i % 2 * kBlock; }
};

// Adds the squares of 4 * kSumLanes numbers to the sums of the lanes.
template <typename W>
inline void AddSquares(FourBlocks<W, kSumLanes> x, double (&sums)[kSumLanes]) {
  constexpr int kWidth = lanes::kWidth<double>;
  const auto square = [](const W* from) {
    const auto value = lanes::WidenToDouble(from);
    return value * value;
  };
  for (int lane = 0; lane < kSumLanes; lane += kWidth) {
    const auto at = [&](int i) { return square(x[i] + lane); };
    auto to = lanes::LoadVector<lanes::Vector<double>>(sums + lane);
    to += (at(0) + at(1)) + (at(2) + at(3));
    std::memcpy(sums + lane, &to, sizeof(to));
  }
}

// Out of 2 * kSumLanes 16-bit floats, two belong to each lane. Returns the sums of their squares,
// for the lanes of one register from `lane` on.
inline lanes::Vector<float> SquaresOfTwo(const Half* from, int lane) {
  constexpr int kWidth = lanes::kWidth<float>;
  const auto a = LoadLanes<kWidth>(from + lane), b = LoadLanes<kWidth>(from + kSumLanes + lane);
  return (a * a + b * b).registers[0];
}
inline lanes::Vector<float> SquaresOfTwo(const BFloat16* from,
                                         int lane) {  // neighbours: no shuffle
  const auto both = lanes::LoadVector<lanes::Vector<std::uint32_t>>(from + 2 * lane);
  const auto lower = std::bit_cast<lanes::Vector<float>>(both << 16);
  const auto upper = std::bit_cast<lanes::Vector<float>>(both & 0xffff0000u);
  return lower * lower + upper * upper;
}

// AddSquares for 16-bit floats, in blocks twice as long, up to the end of a half. A few squares at
// a time are summed in float, and these sums in double. Sums outside [kMinFloatSum, max_float_sum]
// are not exact enough. Their blocks are added up again, in double alone.
template <typename T>
inline void AddSquaresOf16Bit(FourBlocks<T, 2 * kSumLanes> x, float max_float_sum,
                              double (&sums)[kSumLanes]) {
  constexpr std::int64_t kTurn = 4 * kSumLanes, kAtATime = 8 * kTurn;
  for (std::int64_t i = 0; i < x.half; i += kAtATime) {
    const std::int64_t end = std::min(x.half, i + kAtATime);
    double part[kSumLanes] = {};
    for (std::int64_t j = i; j < end; j += kTurn) {
      constexpr int kWidth = lanes::kWidth<float>;
      float few[kSumLanes];
      for (int lane = 0; lane < kSumLanes; lane += kWidth) {
        const auto at = [&](int i) { return SquaresOfTwo(x[i] + j, lane); };
        const auto squares = (at(0) + at(1)) + (at(2) + at(3));
        std::memcpy(few + lane, &squares, sizeof(squares));
      }
      for (int lane = 0; lane < kSumLanes; lane += lanes::kWidth<double>) {
        auto to = lanes::LoadVector<lanes::Vector<double>>(part + lane);
        to += lanes::WidenToDouble(few + lane);
        std::memcpy(part + lane, &to, sizeof(to));
      }
    }
    double all = 0;
    for (const double sum : part) all += sum;
    if (all >= static_cast<double>(kMinFloatSum) && all <= static_cast<double>(max_float_sum)) {
      for (int k = 0; k < kSumLanes; ++k) sums[k] += part[k];
    } else {
      for (const T* const half : {x.first, x.first + x.half}) {
        for (std::int64_t j = i; j < end; j += kTurn) {
          float wide[kTurn];
          for (int k = 0; k < kTurn; ++k) wide[k] = static_cast<float>(half[j + k]);
          AddSquares(FourBlocks<float, kSumLanes>{wide, kTurn / 2}, sums);
        }
      }
    }
  }
}

template <typename T>
double SumOfSquaresOf(const T* x, std::int64_t n, float max_float_sum) {
  double lanes[kSumLanes] = {};
  constexpr int kBlock = sizeof(T) == 2 ? 2 * kSumLanes : kSumLanes;
  const std::int64_t half = n / (4 * kBlock) * (2 * kBlock), whole = 2 * half;
  const FourBlocks<T, kBlock> start{x, half};
  if constexpr (sizeof(T) == 2) {
    AddSquaresOf16Bit(start, max_float_sum, lanes);
  } else {
    for (std::int64_t i = 0; i < half; i += 2 * kBlock) {
      AddSquares(FourBlocks<T, kBlock>{x + i, half}, lanes);
    }
  }
  for (std::int64_t i = whole; i < n; ++i) {
    const auto value = static_cast<double>(static_cast<Wide<T>>(x[i]));
    lanes[(i - whole) % kSumLanes] += value * value;
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

// The leaves of a group as one array.
class Concatenation {
 public:
  explicit Concatenation(const std::vector<Leaf>& leaves) : leaves_(leaves) {
    ends_.reserve(leaves_.size());
    for (const Leaf& leaf : leaves_) ends_.push_back(size() + leaf.count);
  }

  std::int64_t size() const { return ends_.empty() ? 0 : ends_.back(); }

  // Calls fn.operator()<T>(leaf, begin, n) for each leaf that has some of the group's elements
  // [begin, end). These are the n elements from element `begin` of the leaf's data on.
  template <typename Fn>
  void ForPieces(std::int64_t group, std::int64_t begin, std::int64_t end, const Fn& fn) const {
    auto i = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) -
                                      ends_.begin());
    for (; begin < end; ++i) {
      const Leaf& leaf = leaves_[i];
      const std::int64_t here = std::min(end, ends_[i]);
      const std::int64_t offset = group * leaf.count + begin - (ends_[i] - leaf.count);
      const auto run = [&]<typename T>() {
        fn.template operator()<T>(leaf, offset, here - begin);
        return ffi::Error::Success();
      };
      // The handler has checked the dtype.
      static_cast<void>(DispatchDtype(FloatTypes{}, "global_norm", leaf.dtype, run));
      begin = here;
    }
  }

 private:
  const std::vector<Leaf>& leaves_;
  std::vector<std::int64_t> ends_;
};

// How each group's elements are cut into parts. One thread takes many small parts together.
struct Parts {
  std::int64_t elements, size, count;  // elements of a group; elements of a part; parts of a group

  Parts(std::int64_t elements, std::int64_t most)
      : elements(elements),
        size(RowsPerChunk(elements, sizeof(float), most)),
        count(CeilDiv(elements, size)) {}

  // Calls fn(group, part, begin, end) for every part that has elements.
  template <typename Fn>
  void ForEach(const CpuContext& pool, std::int64_t groups, const Fn& fn) const {
    if (count == 0) return;
    const std::int64_t items = groups * count;
    const std::int64_t together =
        std::max<std::int64_t>(1, kMinPartElements / std::min(size, elements));
    ParallelFor(pool, CeilDiv(items, together), [&](std::int64_t chunk) {
      const std::int64_t first = chunk * together;
      for (std::int64_t item = first; item < std::min(items, first + together); ++item) {
        const std::int64_t begin = item % count * size;
        fn(item / count, item % count, begin, std::min(begin + size, elements));
      }
    });
  }
};

// Adds up each group's partial sums, [groups, parts], in order.
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

// Rounds a double to float, before it is rounded to 16 bits. Between two floats, the float whose
// last bit is 1 is taken. So the two roundings give the result of a single one.
inline float RoundToOdd(double value) {
  const auto nearest = static_cast<float>(value);
  const auto bits = std::bit_cast<std::uint32_t>(nearest);
  const auto back = static_cast<double>(nearest);
  if (back == value || value != value || (bits & 1) != 0) return nearest;
  return std::bit_cast<float>(std::abs(back) < std::abs(value) ? bits + 1 : bits - 1);
}

// from[0, n) times the factors; `to` may be `from`.
template <typename T, typename A>
void ScaleInto(const T* from, T* to, std::int64_t n, FactorPair<A> factors) {
  using C = std::conditional_t<std::is_same_v<T, double>, double, A>;  // the compute type
  const C first = factors.first, second = factors.second;
  for (std::int64_t i = 0; i < n; ++i) {
    const C scaled = static_cast<C>(static_cast<Wide<T>>(from[i])) * first * second;
    if constexpr (sizeof(T) == 2 && std::is_same_v<C, double>) {
      to[i] = static_cast<T>(RoundToOdd(scaled));
    } else {
      to[i] = static_cast<T>(scaled);
    }
  }
}

template <typename A>
void ScaleAll(const CpuContext& pool, const ScaleArgs& args) {
  const Concatenation elements(args.leaves);
  const auto scale = [&](std::int64_t group, std::int64_t, std::int64_t begin, std::int64_t end) {
    const FactorPair<A> factors{static_cast<const A*>(args.factors)[group],
                                static_cast<const A*>(args.second_factors)[group]};
    elements.ForPieces(group, begin, end,
                       [&]<typename T>(const Leaf& leaf, std::int64_t first, std::int64_t n) {
                         const T* const from = static_cast<const T*>(leaf.data) + first;
                         T* const to = static_cast<T*>(leaf.result) + first;
                         if (!factors.Keeps()) {
                           ScaleInto(from, to, n, factors);
                         } else if (from != to) {
                           std::copy_n(from, n, to);
                         }
                       });
  };
  Parts(elements.size(), elements.size()).ForEach(pool, args.groups, scale);
}

}  // namespace

ffi::Error SumOfSquares(CpuContext pool, const SumOfSquaresArgs& args) {
  if (args.groups == 0) return ffi::Error::Success();
  const Concatenation elements(args.leaves);
  auto* const partials = static_cast<double*>(args.workspace);
  const float max_float_sum = MaxFloatSum(args.dtype);
  const Parts parts(elements.size(),
                    std::min(kMaxPartialSums, args.workspace_doubles / args.groups));
  parts.ForEach(pool, args.groups,
                [&](std::int64_t group, std::int64_t part, std::int64_t begin, std::int64_t end) {
                  double sum = 0;
                  elements.ForPieces(
                      group, begin, end,
                      [&]<typename T>(const Leaf& leaf, std::int64_t first, std::int64_t n) {
                        sum += SumOfSquaresOf(static_cast<const T*>(leaf.data) + first, n,
                                              max_float_sum);
                      });
                  partials[group * parts.count + part] = sum;
                });
  if (args.dtype == ffi::F64) {
    Finalize<double>(args, partials, parts.count);
  } else {
    Finalize<float>(args, partials, parts.count);
  }
  return ffi::Error::Success();
}

ffi::Error Scale(CpuContext pool, const ScaleArgs& args) {
  if (args.dtype == ffi::F64) {
    ScaleAll<double>(pool, args);
  } else {
    ScaleAll<float>(pool, args);
  }
  return ffi::Error::Success();
}

}  // namespace gradops
