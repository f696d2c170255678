// What softmax cross-entropy's kernels must give for one row: long expressions in double. Plain
// C++, no CUDA.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace gradops {
namespace {

// The results of the forward pass for a row.
struct ExpectedRow {
  double largest, total, logit_of_label, differences;
  double size_of_differences;  // the sum of the absolute terms that the kernel adds up

  // What is subtracted from logits.
  double base() const { return std::isinf(largest) && largest < 0 ? 0 : largest; }
};

// `column` is the place of the label's logit. It may be outside the row.
inline ExpectedRow ExpectRow(const std::vector<double>& x, std::int64_t column) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  ExpectedRow row{-kInfinity, 0, 0, 0, 0};
  bool is_bad = false;
  for (const double logit : x) {
    is_bad |= std::isnan(logit) || logit == kInfinity;
    if (logit > row.largest) row.largest = logit;
  }
  if (column >= 0 && column < static_cast<std::int64_t>(x.size())) {
    row.logit_of_label = x[static_cast<std::size_t>(column)];
  }
  const double origin = !x.empty() && std::isfinite(x[0]) ? x[0] : 0;
  long double total = 0, differences = 0, size = 0;
  for (const double logit : x) {
    total += std::exp(logit - row.base());
    differences += static_cast<long double>(logit) - row.base();
    size += std::fabs(logit - origin) + std::fabs(origin - row.base());
  }
  row.total = is_bad ? kNaN : static_cast<double>(total);
  row.differences = is_bad ? kNaN : static_cast<double>(differences);
  row.size_of_differences = static_cast<double>(size);
  return row;
}

// The numbers of an ignored row: those of one logit of 0.
inline ExpectedRow IgnoredRow() {
  return {0, 1, 0, 0, 0};
}

// The numbers of a row that the backward pass takes.
struct DerivativeOfRow {
  double largest, factor, target, uniform;

  double Of(double logit, bool is_label) const {
    return factor * std::exp(logit - largest) + uniform + (is_label ? target : 0);
  }
  // The size of the rounding errors of the derivative, in units of the arithmetic's precision.
  double Size(double logit) const {
    const double exponential = std::exp(logit - largest);
    const double product = exponential > 0 ? exponential * (1 + std::fabs(logit - largest)) : 0;
    return std::fabs(factor) * product + std::fabs(uniform) + std::fabs(target);
  }
};

// --- Tests of the above, with other formulas -----------------------------------------------------

// Returns how many expectations differ from plain formulas, which are right for small finite
// logits.
inline int CheckReference() {
  int wrong = 0;
  const auto near = [&](double a, double b) {
    wrong += !(a == b || std::fabs(a - b) <= 1e-12 * (1 + std::fabs(b)));
  };
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::vector<double> x{0.5, -2, 3, 1, -0.25};
  double exponentials = 0, sum = 0;
  for (const double logit : x) exponentials += std::exp(logit), sum += logit;
  for (std::int64_t label = -1; label <= 5; ++label) {
    const bool is_class = label >= 0 && label < 5;
    const ExpectedRow row = ExpectRow(x, label);
    near(row.largest, 3);
    near(std::log(row.total) + row.largest, std::log(exponentials));
    near(row.logit_of_label, is_class ? x[static_cast<std::size_t>(label)] : 0);
    near(row.differences, sum - 5 * 3.0);
    if (!is_class) continue;
    // The derivative of the loss with label smoothing, as a difference of two losses.
    constexpr double kSmoothing = 0.3, kStep = 1e-6;
    const auto loss = [&](std::vector<double> logits) {
      const ExpectedRow of = ExpectRow(logits, label);
      return std::log(of.total) + (1 - kSmoothing) * (of.largest - of.logit_of_label) -
             kSmoothing * of.differences / 5;
    };
    const DerivativeOfRow derivative{row.largest, 1 / row.total, kSmoothing - 1, -kSmoothing / 5};
    for (std::size_t i = 0; i < x.size(); ++i) {
      std::vector<double> more = x, less = x;
      more[i] += kStep, less[i] -= kStep;
      const double slope = (loss(more) - loss(less)) / (2 * kStep);
      wrong += std::fabs(derivative.Of(x[i], static_cast<std::int64_t>(i) == label) - slope) > 1e-8;
    }
  }
  // Rows of special logits.
  const ExpectedRow none = ExpectRow({-kInfinity, -kInfinity}, 0), empty = ExpectRow({}, -1);
  const ExpectedRow one = ExpectRow({-kInfinity, 7, -kInfinity}, 1);
  near(none.largest, -kInfinity), near(none.total, 0), near(none.differences, -kInfinity);
  near(empty.largest, -kInfinity), near(empty.total, 0), near(empty.differences, 0);
  near(one.largest, 7), near(one.total, 1), near(one.logit_of_label, 7);
  for (const double bad : {kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
    const ExpectedRow row = ExpectRow({1, bad, 2}, 0);
    wrong += !std::isnan(row.total) + !std::isnan(row.differences);
    near(row.largest, bad > 0 ? kInfinity : 2);
  }
  return wrong;
}

}  // namespace
}  // namespace gradops
