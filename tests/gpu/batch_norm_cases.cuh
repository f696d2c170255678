// A test case of check_batch_norm.cu: its sizes, options, and arrays on host and device.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

#include "common/dtype.h"
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
  std::int64_t shift = 0;  // elements between a 16-byte boundary and the start of arrays
};

struct Case : Size, Options {
  std::int64_t terms() const { return rows * inner; }
  std::int64_t elements() const { return groups * rows * channels * inner; }
  std::int64_t parameters() const { return groups * channels; }
  // The index of element i of a channel of a group.
  std::int64_t at(std::int64_t group, std::int64_t channel, std::int64_t i) const {
    return ((group * rows + i / inner) * channels + channel) * inner + i % inner;
  }
  std::string Text() const {
    std::string text;
    for (const std::int64_t n : {groups, rows, channels, inner}) text += std::to_string(n) + " ";
    for (const bool b : {relu, residual, has_y, in_place, shared, scale}) text += b ? "1" : "0";
    return text + " " + std::to_string(partial_rows) + " " + std::to_string(shift);
  }
};

// A number from -1 to 1.
double Random() {
  static std::uint32_t state = 12345;
  state = state * 1664525u + 1013904223u;
  std::uint32_t h = state;
  h = (h ^ (h >> 16)) * 2246822519u;
  return static_cast<double>(h ^ (h >> 13)) / 2147483648.0 - 1;
}

// An array on the host and on the device.
template <typename T>
class Array {
 public:
  Array(std::int64_t n, std::int64_t shift, Arrays& arrays)
      : host(static_cast<std::size_t>(n)), device(arrays.Empty<T>(n + shift) + shift) {}
  template <typename Fn>  // fn(index)
  Array(std::int64_t n, std::int64_t shift, Arrays& arrays, const Fn& fn)
      : Array(n, shift, arrays) {
    for (std::int64_t i = 0; i < n; ++i) {
      host[static_cast<std::size_t>(i)] = static_cast<T>(static_cast<Accum<T>>(fn(i)));
    }
    Upload();
  }
  void Upload() { Check(cudaMemcpy(device, host.data(), bytes(), cudaMemcpyHostToDevice)); }
  void Download() { Check(cudaMemcpy(host.data(), device, bytes(), cudaMemcpyDeviceToHost)); }
  double operator[](std::int64_t i) const {
    return static_cast<double>(static_cast<Accum<T>>(host[static_cast<std::size_t>(i)]));
  }
  std::size_t bytes() const { return host.size() * sizeof(T); }

  std::vector<T> host;
  T* device;
};

template <typename T>
constexpr double kUnit = sizeof(T) == 8            ? 1e-15
                         : sizeof(T) == 4          ? 1.2e-7
                         : std::is_same_v<T, Half> ? 0x1p-10
                                                   : 0x1p-7;

void Near(const Case& c, const char* name, std::int64_t i, double got, double want, double error) {
  if (std::fabs(got - want) <= error) return;
  std::printf("%s: %s[%lld] is %.9g, not %.9g (%g)\n", c.Text().c_str(), name,
              static_cast<long long>(i), got, want, error);
  std::exit(1);
}

}  // namespace
}  // namespace gradops
