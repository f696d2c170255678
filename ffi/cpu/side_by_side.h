// Short rows side by side: lane r of a register belongs to row r. Each row is computed by itself,
// in loops over columns. No sum goes across lanes. A row's result thus depends neither on the other
// rows nor on the instruction set.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "common/math.h"
#include "common/shape.h"
#include "cpu/lanes.h"
#include "cpu/wide.h"

namespace gradops {

// Whether rows of n numbers are read and written in place, column by column. Longer rows go by way
// of a block, so that memory is read and written line after line. RMS norm of 2,000,000 float32
// numbers, on two cores of an EPYC with AVX2: rows of 64 columns in place take 4.5 ms. Rows of 63
// columns by way of a block take 2.4 ms.
template <typename T>
inline bool IsInPlace(std::int64_t n) {
  using A = Accum<T>;
  return std::is_same_v<T, A> && n % lanes::kPart<A> == 0 && n * std::int64_t{sizeof(A)} <= 64;
}

// How many rows lie side by side.
template <typename A>
inline constexpr int kSide = kLanes<A>;

// Columns of kSide rows: number r of column j belongs to row r. It has room for a few more columns.
template <typename A, int kMaxColumns>
class Side {
 public:
  Lanes<A> operator[](std::int64_t j) const { return LoadLanes<kSide<A>>(values_ + j * kSide<A>); }
  void Set(std::int64_t j, const Lanes<A>& numbers) { StoreLanes(values_ + j * kSide<A>, numbers); }
  A* column(std::int64_t j) { return values_ + j * kSide<A>; }
  const A* column(std::int64_t j) const { return values_ + j * kSide<A>; }

 private:
  alignas(64) A values_[(kMaxColumns + lanes::kWidth<A>)*kSide<A>];
};

namespace side {

// Loads kPart columns, which are 16 bytes of a row, from kWidth rows of n numbers. Stores them at
// `to`, column by column. 16 bytes of each row are read, also past the row's end.
template <typename A>
void LoadColumns(const A* from, std::int64_t n, A* to) {
  constexpr int kPart = lanes::kPart<A>;
  lanes::Vector<A> registers[kPart];
  lanes::ForEachIndex<kPart>([&](auto... i) {
    ((registers[i] = lanes::Concatenated<A>([&, from_row = from + i * n](int part) {
        return lanes::LoadVector<lanes::Part<A>>(from_row + part * kPart * n);
      })),
     ...);
  });
  lanes::Transpose(registers);
  lanes::ForEachIndex<kPart>(
      [&](auto... i) { (lanes::Narrow(to + i * kSide<A>, registers[i]), ...); });
}

// The reverse of LoadColumns. Numbers written past a row's end have to be overwritten afterwards.
template <typename A>
void StoreColumns(A* to, std::int64_t n, const A* from) {
  constexpr int kPart = lanes::kPart<A>;
  lanes::Vector<A> registers[kPart];
  lanes::ForEachIndex<kPart>(
      [&](auto... i) { ((registers[i] = lanes::Widen(from + i * kSide<A>)), ...); });
  lanes::Transpose(registers);
  lanes::ForEachIndex<lanes::kWidth<A> / kPart>([&](auto... part) {
    const auto store = [&](auto one_part) {
      lanes::ForEachIndex<kPart>([&](auto... i) {
        const auto store_row = [&](auto row) {
          const auto numbers = lanes::PartOf<one_part, A>(registers[row]);
          std::memcpy(to + (one_part * kPart + row) * n, &numbers, sizeof(numbers));
        };
        (store_row(i), ...);
      });
    };
    (store(part), ...);
  });
}

}  // namespace side

// Loads `rows` <= kSide rows of n elements, one after the other. Lanes without a row get zeros.
template <typename T, int kMaxColumns>
void LoadSide(const T* from, std::int64_t rows, std::int64_t n,
              Side<Accum<T>, kMaxColumns>& columns) {
  using A = Accum<T>;
  const auto load = [&columns, n](const A* wide) {
    for (std::int64_t j = 0; j < n; j += lanes::kPart<A>) {
      for (int first = 0; first < kSide<A>; first += lanes::kWidth<A>) {
        side::LoadColumns(wide + first * n + j, n, columns.column(j) + first);
      }
    }
  };
  if (n == 1) {
    const Lanes<A> column =
        rows == kSide<A> ? AtLanes<kSide<A>>{0}(from) : AtLast<kSide<A>>{0, rows}(from);
    return columns.Set(0, column);
  }
  if constexpr (std::is_same_v<T, A>) {
    if (rows == kSide<A> && IsInPlace<T>(n)) return load(from);
  }
  alignas(64) A wide[(kMaxColumns + 1) * kSide<A>];
  const std::int64_t count = rows * n;
  if (rows == kSide<A>) {
    ForLanes<kSide<A>>(count, [=, &wide](auto at) { at.Store(wide, at(from)); });
  } else {
    ForWholeLanes<kSide<A>>(count,
                            [=, &wide](auto at) { StoreLanes(wide + at.i, Lanes<A>(at(from))); });
    const std::int64_t written = (count + kSide<A> - 1) / kSide<A> * kSide<A>;
    if (written < n * kSide<A>) std::fill(wide + written, wide + n * kSide<A>, A{0});
  }
  std::fill_n(wide + n * kSide<A>, kSide<A>, A{0});  // read past the last row's end
  load(wide);
}

// The reverse of LoadSide. Stores go past the caches if `streamed`.
template <typename T, int kMaxColumns>
void StoreSide(T* to, std::int64_t rows, std::int64_t n, const Side<Accum<T>, kMaxColumns>& columns,
               bool streamed = false) {
  using A = Accum<T>;
  constexpr std::int64_t kPart = lanes::kPart<A>;
  if (n == 1) {
    StoreForLanes<kSide<A>>(to, rows, streamed,
                            [from = columns.column(0)](auto at) { return at(from); });
    return;
  }
  // The last columns come first: they may write past a row's end, into the next row's first ones.
  const auto store = [&columns, n](A* wide) {
    for (std::int64_t j = (n - 1) / kPart * kPart; j >= 0; j -= kPart) {
      for (int first = 0; first < kSide<A>; first += lanes::kWidth<A>) {
        side::StoreColumns(wide + first * n + j, n, columns.column(j) + first);
      }
    }
  };
  if constexpr (std::is_same_v<T, A>) {
    if (rows == kSide<A> && IsInPlace<T>(n) && !streamed) return store(to);
  }
  alignas(64) A wide[(kMaxColumns + 1) * kSide<A>];
  store(wide);
  StoreForLanes<kSide<A>>(to, rows * n, streamed, [&wide](auto at) { return at(wide); });
}

// Loads and stores one number for each of `rows` rows.
template <typename T>
Lanes<Accum<T>> LoadRows(const T* from, std::int64_t rows) {
  if (rows == kSide<Accum<T>>) return LoadLanes<kSide<Accum<T>>>(from);
  return AtLast<kSide<Accum<T>>>{0, rows}(from);
}
template <typename A>
void StoreRows(A* to, std::int64_t rows, const Lanes<A>& numbers) {
  if (rows == kSide<A>) return StoreLanes(to, numbers);
  AtLast<kSide<A>>{0, rows}.Store(to, numbers);
}

// The sums over columns j < n of terms(j), which returns an array of kSums terms. Only a few
// columns are added up in one go: see LaneSums (lanes.h).
template <typename A, int kSums, typename Terms>
std::array<Lanes<A>, kSums> SideSums(std::int64_t n, const Terms& terms) {
  constexpr std::int64_t kAtATime = 16;
  const auto zeros = [] {
    return lanes::ForEachIndex<kSums>(
        [](auto... s) { return std::array{((void)s, Lanes<A>(0))...}; });
  };
  const auto add = [](std::array<Lanes<A>, kSums>& to, const std::array<Lanes<A>, kSums>& terms) {
    lanes::ForEachIndex<kSums>([&](auto... s) { ((to[s] += terms[s]), ...); });
  };
  std::array<Lanes<A>, kSums> sums = zeros();
  for (std::int64_t j = 0; j < n;) {
    std::array<Lanes<A>, kSums> few = zeros();
    for (const std::int64_t end = std::min(n, j + kAtATime); j < end; ++j) add(few, terms(j));
    add(sums, few);
  }
  return sums;
}

// InverseDeviation (common/math.h) of each lane.
template <typename A>
Lanes<A> InverseDeviation(const Lanes<A>& variance, const Epsilon<A>& epsilon) {
  const Lanes<A> square = variance * Lanes<A>(epsilon.part) + Lanes<A>(epsilon.added);
  const Lanes<A> inverse = Lanes<A>(epsilon.root) / Sqrt(square);
  return epsilon.strict ? inverse : inverse + (variance - variance);
}
// MeanRounding (common/math.h) of each lane.
template <typename A>
Lanes<A> MeanRounding(const Lanes<A>& delta, const Lanes<A>& mean) {
  const Lanes<A> zero = 0, size = Max(delta, zero - delta), of_mean = Max(mean, zero - mean);
  return IfGreater(of_mean * Lanes<A>(2 * std::numeric_limits<A>::epsilon()), size, delta, zero);
}
// VarianceOf (common/math.h) of each lane.
template <typename A>
Lanes<A> VarianceOf(const Lanes<A>& mean_square, const Lanes<A>& mean) {
  const Lanes<A> variance = mean_square - mean * mean;
  return IfGreater(Lanes<A>(0), variance, Lanes<A>(0), variance);
}

// Lane by lane: 1 if the variance plus epsilon is outside the range in which squares have all their
// digits, else 0. NaN is outside. A mean of squares may take the variance's place.
template <typename A>
Lanes<A> IsUnsafe(const Lanes<A>& variance, const Epsilon<A>& epsilon) {
  const Lanes<A> square = variance * Lanes<A>(epsilon.part) + Lanes<A>(epsilon.added);
  using Limits = std::numeric_limits<A>;
  const Lanes<A> is_finite = IfGreater(Limits::infinity(), square, Lanes<A>(0), Lanes<A>(1));
  return IfGreater(square, Limits::min() / Limits::epsilon(), is_finite, Lanes<A>(1));
}

// A parameter's numbers for rows side by side. The rows may belong to several groups.
template <typename A, int kMaxColumns>
class SideParam {
 public:
  template <int kAbsent>
  SideParam(const WideParam<A, kAbsent>& param, const RowShape& shape)
      : shape_(shape), shared_(param.shared()) {
    if (shared_) SetAll(param(0, 0));
  }
  // Moves to rows [row, row + rows). `param` must be the constructor's.
  template <int kAbsent>
  void MoveTo(const WideParam<A, kAbsent>& param, std::int64_t row, std::int64_t rows) {
    if (shared_) return;
    const std::int64_t first = row / shape_.rows, last = (row + rows - 1) / shape_.rows;
    if (first == last) {
      if (first != group_) SetAll(param(first, 0));
      group_ = first;
      return;
    }
    group_ = -1;
    if (shape_.rows == 1) {
      LoadSide(param(first, 0), rows, shape_.features, numbers_);
    } else {
      for (std::int64_t r = 0; r < rows; ++r) {
        const A* const own = param((row + r) / shape_.rows, 0);
        for (std::int64_t j = 0; j < shape_.features; ++j) numbers_.column(j)[r] = own[j];
      }
    }
  }
  Lanes<A> operator[](std::int64_t j) const { return numbers_[j]; }
  const Side<A, kMaxColumns>& numbers() const { return numbers_; }

 private:
  void SetAll(const A* own) {
    for (std::int64_t j = 0; j < shape_.features; ++j) numbers_.Set(j, Lanes<A>(own[j]));
  }
  RowShape shape_;
  bool shared_;
  std::int64_t group_ = -1;  // the group whose numbers all lanes have; -1: several groups
  Side<A, kMaxColumns> numbers_;
};

}  // namespace gradops
