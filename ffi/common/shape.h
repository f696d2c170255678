// Shapes and parameters as row-wise ops see them.
#pragma once

#include <cstdint>
#include <string>

#include "common/dtype.h"
#include "xla/ffi/api/ffi.h"

namespace gradops {

// The shape of x, [groups, rows, features]: the vmapped axes, the row axes and the feature axis.
struct RowShape {
  std::int64_t groups, rows, features;
  std::int64_t all_rows() const { return groups * rows; }
  std::int64_t elements() const { return groups * rows * features; }
};

// The shape of x in ops whose features are channels: [groups, rows, features, inner]. The axes in
// `inner` follow the channels' axis. They are row axes, too.
struct ChannelShape {
  RowShape outer;
  std::int64_t inner;
  std::int64_t channels() const { return outer.features; }
  // The number of elements of a channel in a group.
  std::int64_t terms() const { return outer.rows * inner; }
  std::int64_t elements() const { return outer.elements() * inner; }
};

// A parameter along the feature axis, of any float dtype. data is null if the op has none. Group g
// reads data + g * group_stride. The stride is 0 if all groups share the parameter.
struct Param {
  const void* data = nullptr;
  std::int64_t group_stride = 0;
  ffi::DataType dtype = ffi::DataType::INVALID;
};

// A parameter's gradient, [groups, features], of any float dtype. data is null if it is not wanted.
struct ParamGrad {
  void* data = nullptr;
  ffi::DataType dtype = ffi::DataType::INVALID;
};

// The product of dimensions of a buffer, which the handler has checked (common/handler.h).
inline std::int64_t Product(ffi::Span<const std::int64_t> dims) {
  std::int64_t n = 1;
  for (const std::int64_t d : dims) n *= d;
  return n;
}

inline std::string Describe(const ffi::AnyBuffer& buffer) {
  std::string text = Name(buffer.element_type()) + "[";
  const auto dims = buffer.dimensions();
  for (std::size_t i = 0; i < dims.size(); ++i) {
    if (i > 0) text += ',';
    text += std::to_string(dims[i]);
  }
  text += ']';
  return text;
}

}  // namespace gradops
