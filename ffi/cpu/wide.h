// Parameters and their gradients in the accumulation type, and loops over blocks of columns.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>

#include "common/dtype.h"
#include "common/shape.h"
#include "cpu/parallel.h"
#include "cpu/stream.h"

namespace gradops {

// The columns of a block. Long sums, block by block, also have a small rounding error.
inline constexpr std::int64_t kBlock = 1024;

// A block of constants that stands for an absent operand.
template <typename T, int kValue>
inline const std::array<T, kBlock> kConstantBlock = [] {
  std::array<T, kBlock> block{};
  block.fill(static_cast<T>(static_cast<Accum<T>>(kValue)));
  return block;
}();

// Calls fn(i) for each i < n, in the thread pool if there are many.
template <typename Fn>
void ForEach(const CpuContext& pool, std::int64_t n, const Fn& fn) {
  const std::int64_t chunk = RowsPerChunk(n, sizeof(double), n);
  ParallelFor(pool, (n + chunk - 1) / chunk, [&](std::int64_t c) {
    for (std::int64_t i = c * chunk; i < std::min(n, (c + 1) * chunk); ++i) fn(i);
  });
}

// One number of a parameter, in the accumulation type. If the parameter is absent: `absent`.
template <typename A>
A ReadParam(const Param& param, std::int64_t group, std::int64_t feature, A absent) {
  A value = absent;
  if (param.data == nullptr) return value;
  if (param.dtype == kDtype<A>) {  // the usual case: faster than the dispatch
    return static_cast<const A*>(param.data)[group * param.group_stride + feature];
  }
  (void)DispatchDtype(FloatTypes{}, "parameter", param.dtype, [&]<typename P>() {
    const P* const values = static_cast<const P*>(param.data) + group * param.group_stride;
    value = static_cast<A>(static_cast<Accum<P>>(values[feature]));
    return ffi::Error::Success();
  });
  return value;
}

// A parameter plus `offset` in the accumulation type, for all groups. If the parameter is absent:
// the constant kAbsent. Zeros become `zero`.
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
  // Whether all groups have the same numbers.
  bool shared() const { return data_ == nullptr || stride_ == 0; }
  const A* operator()(std::int64_t group, std::int64_t start) const {
    if (data_ == nullptr) return kConstantBlock<A, kAbsent>.data();
    return data_ + group * stride_ + start;
  }

 private:
  std::unique_ptr<A[]> owned_;
  const A* data_ = nullptr;
  std::int64_t stride_ = 0;
};

// A parameter's gradient in the accumulation type. If the result has this dtype, `data` is the
// result itself. Otherwise `data` is an array, and Store rounds it to the result.
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

// Prepares the memory of a gradient. Each group has a gradient of its own: if groups are many and
// small, gradients are as large as x. Returns whether whole cache lines go past the caches.
template <typename A>
bool PrepareGrad(const WideGrad<A>& grad, const RowShape& shape) {
  if (grad.data() == nullptr) return false;
  const std::int64_t bytes = shape.groups * shape.features * std::int64_t{sizeof(A)};
  return PrepareResult(grad.data(), bytes, {}) && BytesToLine(grad.data()) == 0;
}

// Sets a gradient to 0 if there is nothing to add up.
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
