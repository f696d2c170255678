// Batch norm on the CPU: a second look at elements whose squares add up to more than A holds.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/dtype.h"
#include "common/math.h"

namespace gradops {

// Whether the squares have to be added up again, in double. A NaN or an infinite element also
// spoils the sum of the differences. A second look at such elements would find the same NaN.
template <typename Sum>
bool NeedsSecondLook(Sum sum, Sum sum_squares) {
  return Overflowed(sum_squares) && std::isfinite(sum);
}

// The mean of x - base, and the sum of the squared deviations from the mean, both in double. The
// elements lie in `rows` rows of `inner` elements. A row starts `pitch` elements after the one
// before.
template <typename T>
void LargeMoments(const T* x, std::int64_t rows, std::int64_t inner, std::int64_t pitch,
                  Accum<T> base, double& mean, double& squares) {
  const auto sum_of = [=](const auto& term) {
    double sum = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < inner; ++i) {
        sum += term(static_cast<double>(static_cast<Accum<T>>(x[row * pitch + i])) -
                    static_cast<double>(base));
      }
    }
    return sum;
  };
  const double average =
      sum_of([](double difference) { return difference; }) / static_cast<double>(rows * inner);
  mean = average;
  squares =
      sum_of([=](double difference) { return (difference - average) * (difference - average); });
}

}  // namespace gradops
