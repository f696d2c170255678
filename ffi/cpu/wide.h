// Rows, parameters and their gradients in the accumulation type, and loops over blocks of columns.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#include "common/dtype.h"
#include "common/shape.h"
#include "cpu/parallel.h"

namespace gradops {

// Columns at a time. Adding up per block also keeps the rounding error of long sums small.
inline constexpr std::int64_t kBlock = 1024;
inline constexpr int kLanes = 16;

// What stands for an absent operand.
template <typename A, int kValue>
inline constexpr std::array<A, kBlock> kConstantBlock = [] {
  std::array<A, kBlock> block{};
  block.fill(kValue);
  return block;
}();

// A row in the accumulation type, block by block; zeros where there is none.
template <typename T>
class WideRow {
 public:
  using A = Accum<T>;
  // `rows` is [rows, columns], or null.
  WideRow(const void* rows, std::int64_t row, std::int64_t columns)
      : row_(rows == nullptr ? nullptr : static_cast<const T*>(rows) + row * columns),
        columns_(columns) {}

  // Columns [start, start + kBlock) of the row; valid until the next call.
  const A* operator()(std::int64_t start) {
    if (row_ == nullptr) return kConstantBlock<A, 0>.data();
    if constexpr (std::is_same_v<T, A>) {
      return row_ + start;
    } else {
      if (start != start_) Widen(row_ + start, std::min(kBlock, columns_ - start), block_);
      start_ = start;
      return block_;
    }
  }

 private:
  struct Empty {};

  static void Widen(const T* __restrict__ row, std::int64_t n, A* __restrict__ block) {
    for (std::int64_t i = 0; i < n; ++i) block[i] = static_cast<A>(row[i]);
  }

  const T* row_;
  std::int64_t columns_;
  std::int64_t start_ = -1;
  [[no_unique_address]] std::conditional_t<std::is_same_v<T, A>, Empty, A[kBlock]> block_;
};

// row[i] = fn(i) for each i < n <= kBlock, where fn computes in the accumulation type.
template <typename T, typename Fn>
void StoreEach(T* __restrict__ row, std::int64_t n, const Fn& fn) {
  using A = Accum<T>;
  if constexpr (std::is_same_v<T, A>) {
    for (std::int64_t i = 0; i < n; ++i) row[i] = fn(i);
  } else {
    A block[kBlock];
    for (std::int64_t i = 0; i < n; ++i) block[i] = fn(i);
    for (std::int64_t i = 0; i < n; ++i) row[i] = static_cast<T>(block[i]);
  }
}

// The sums over i < n of terms(i), which returns an array of kSums values. Each lane adds up a few
// terms at a time. Many in a row would be biased: the squares of numbers on a grid, as differences
// of large numbers are, all round in the same direction.
template <typename A, int kSums, typename Terms>
std::array<A, kSums> LaneSums(std::int64_t n, const Terms& terms) {
  constexpr std::int64_t kAtATime = 16 * kLanes;
  using Lanes = A[kSums][kLanes];
  const auto add_terms = [&](std::int64_t i, std::int64_t end, Lanes& lanes) {
    for (; i + kLanes <= end; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const std::array<A, kSums> term = terms(i + lane);
        for (int s = 0; s < kSums; ++s) lanes[s][lane] += term[s];
      }
    }
    for (int lane = 0; i + lane < end; ++lane) {
      const std::array<A, kSums> term = terms(i + lane);
      for (int s = 0; s < kSums; ++s) lanes[s][lane] += term[s];
    }
  };
  Lanes lanes = {};
  add_terms(0, std::min(n, kAtATime), lanes);
  for (std::int64_t start = kAtATime; start < n; start += kAtATime) {
    Lanes few = {};
    add_terms(start, std::min(n, start + kAtATime), few);
    for (int s = 0; s < kSums; ++s) {
      for (int lane = 0; lane < kLanes; ++lane) lanes[s][lane] += few[s][lane];
    }
  }
  std::array<A, kSums> sums;
  for (int s = 0; s < kSums; ++s) {
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[s][lane] += lanes[s][lane + half];
    }
    sums[s] = lanes[s][0];
  }
  return sums;
}

// fn(i) for each i < n, in the pool where there are many.
template <typename Fn>
void ForEach(const CpuContext& pool, std::int64_t n, const Fn& fn) {
  const std::int64_t chunk = RowsPerChunk(n, sizeof(double), n);
  ParallelFor(pool, (n + chunk - 1) / chunk, [&](std::int64_t c) {
    for (std::int64_t i = c * chunk; i < std::min(n, (c + 1) * chunk); ++i) fn(i);
  });
}

// One number of a parameter, in the accumulation type; `absent` where there is none.
template <typename A>
A ReadParam(const Param& param, std::int64_t group, std::int64_t feature, A absent) {
  A value = absent;
  if (param.data == nullptr) return value;
  (void)DispatchDtype(FloatTypes{}, "parameter", param.dtype, [&]<typename P>() {
    const P* const values = static_cast<const P*>(param.data) + group * param.group_stride;
    value = static_cast<A>(static_cast<Accum<P>>(values[feature]));
    return ffi::Error::Success();
  });
  return value;
}

// A parameter plus `offset` in the accumulation type, for all groups; a constant where it is
// absent. Zeros become `zero`.
template <typename A, int kAbsent>
class WideParam {
 public:
  WideParam() = default;
  WideParam(const CpuContext& pool, const Param& param, const RowShape& shape, double offset,
            A zero = 0)
      : stride_(param.group_stride) {
    if (param.data == nullptr) return;
    if (param.dtype == kDtype<A> && offset == 0 && zero == 0) {
      data_ = static_cast<const A*>(param.data);
      return;
    }
    const std::int64_t n = shape.features * (stride_ == 0 ? 1 : shape.groups);
    owned_ = std::make_unique_for_overwrite<A[]>(static_cast<std::size_t>(n));
    data_ = owned_.get();
    (void)DispatchDtype(FloatTypes{}, "parameter", param.dtype, [&]<typename P>() {
      const P* const values = static_cast<const P*>(param.data);
      ForEach(pool, n, [&](std::int64_t i) {
        const A value = static_cast<A>(static_cast<Accum<P>>(values[i])) + static_cast<A>(offset);
        owned_[i] = value == 0 && zero != 0 ? zero : value;
      });
      return ffi::Error::Success();
    });
  }
  const A* operator()(std::int64_t group, std::int64_t start) const {
    if (data_ == nullptr) return kConstantBlock<A, kAbsent>.data();
    return data_ + group * stride_ + start;
  }

 private:
  std::unique_ptr<A[]> owned_;
  const A* data_ = nullptr;
  std::int64_t stride_ = 0;
};

// A parameter's gradient in the accumulation type: the result itself, or, for a result of another
// dtype, an array that Store rounds to it.
template <typename A>
class WideGrad {
 public:
  WideGrad(const ParamGrad& grad, const RowShape& shape)
      : grad_(grad), elements_(shape.groups * shape.features) {
    if (grad.data == nullptr) return;
    if (grad.dtype == kDtype<A>) {
      data_ = static_cast<A*>(grad.data);
    } else {
      owned_ = std::make_unique_for_overwrite<A[]>(static_cast<std::size_t>(elements_));
      data_ = owned_.get();
    }
  }
  A* data() const { return data_; }
  ffi::Error Store(const CpuContext& pool) const {
    if (owned_ == nullptr) return ffi::Error::Success();
    return DispatchDtype(FloatTypes{}, "gradient", grad_.dtype, [&]<typename P>() {
      P* const result = static_cast<P*>(grad_.data);
      ForEach(pool, elements_, [&](std::int64_t i) {
        result[i] = static_cast<P>(static_cast<Accum<P>>(owned_[i]));
      });
      return ffi::Error::Success();
    });
  }

 private:
  ParamGrad grad_;
  std::int64_t elements_;
  std::unique_ptr<A[]> owned_;
  A* data_ = nullptr;
};

// Where there is nothing to add up.
inline void SetZero(const ParamGrad& grad, const RowShape& shape) {
  if (grad.data == nullptr) return;
  const std::int64_t bytes = shape.groups * shape.features * ByteWidthOf(grad.dtype);
  std::memset(grad.data, 0, static_cast<std::size_t>(bytes));
}

template <typename Fn>
void ForBlocks(std::int64_t columns, const Fn& fn) {
  for (std::int64_t start = 0; start < columns; start += kBlock) {
    fn(start, std::min(kBlock, columns - start));
  }
}

}  // namespace gradops
