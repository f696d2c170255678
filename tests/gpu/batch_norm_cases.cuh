// A test case of check_batch_norm.cu: its sizes and options, and comparisons.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "driver.cuh"

namespace gradops {
namespace {

struct Size {
  std::int64_t groups, rows, channels, inner;
};

struct Options {
  bool relu = false;
  bool residual = false;
  bool has_y = true;      // the backward pass gets y
  bool in_place = false;  // dx is dy
  bool shared = false;    // all groups share parameters
  bool scale = true;      // there are scale and bias; their dtype is not x's
  std::int64_t partial_rows = 512;
  std::int64_t shift = 0;   // elements between a 16-byte boundary and the start of arrays
  std::int64_t bundle = 1;  // channels of a bundle; more than 1: group norm
  bool silu = false;
};

struct Case : Size, Options {
  std::int64_t terms() const { return rows * inner; }
  std::int64_t elements() const { return groups * rows * channels * inner; }
  std::int64_t parameters() const { return groups * channels; }
  std::int64_t bundles() const { return groups * channels / bundle; }
  // The index of element i of a channel of a group.
  std::int64_t at(std::int64_t group, std::int64_t channel, std::int64_t i) const {
    return ((group * rows + i / inner) * channels + channel) * inner + i % inner;
  }
  std::string Text() const {
    std::string text;
    for (const std::int64_t n : {groups, rows, channels, inner}) text += std::to_string(n) + " ";
    for (const bool b : {relu, residual, has_y, in_place, shared, scale, silu}) {
      text += b ? "1" : "0";
    }
    for (const std::int64_t n : {partial_rows, shift, bundle}) text += " " + std::to_string(n);
    return text;
  }
};

void Near(const Case& c, const char* name, std::int64_t i, double got, double want, double error) {
  if (std::fabs(got - want) <= error) return;
  std::printf("%s: %s[%lld] is %.9g, not %.9g (%g)\n", c.Text().c_str(), name,
              static_cast<long long>(i), got, want, error);
  std::exit(1);
}

}  // namespace
}  // namespace gradops
