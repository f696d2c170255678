// Shapes as row-wise ops see them, and the checks that every handler makes of every operand.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

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

// Which dtypes a parameter and its gradient may have.
enum class ParamDtype { kAccum, kAnyFloat };

// Checks operands against x and remembers the first mistake. Calls read like the op's contract:
//   RowChecker check("layer_norm_fwd", x, group_rank);
//   check.Rows("y", *y).Stat("mean", *mean);
//   const Param scale = check.OptionalParam("scale", s, ParamDtype::kAnyFloat);
//   if (!check.ok()) return check.error();
//
// An absent optional operand or result has shape [0] and the accumulation dtype.
class RowChecker {
 public:
  // inner_rank: the number of x's axes after the feature axis.
  RowChecker(std::string_view op, const ffi::AnyBuffer& x, std::int64_t group_rank,
             std::int64_t inner_rank = 0)
      : op_(op), x_(x) {
    const auto dims = x.dimensions();
    const auto rank = static_cast<std::int64_t>(dims.size());
    if (!IsFloat(x.element_type())) {
      Fail("x", "float16, bfloat16, float32 or float64", x);
    } else if (group_rank < 0 || group_rank >= rank) {
      message_ = op_ + ": attribute group_rank must be in [0, rank of x), got " +
                 std::to_string(group_rank) + " for x " + Describe(x);
    } else if (inner_rank < 0 || inner_rank >= rank - group_rank) {
      message_ = op_ + ": attribute inner_rank must be in [0, rank of x - group_rank), got " +
                 std::to_string(inner_rank) + " for x " + Describe(x);
    } else {
      group_rank_ = static_cast<std::size_t>(group_rank);
      feature_axis_ = static_cast<std::size_t>(rank - 1 - inner_rank);
      shape_ = {Product(dims.first(group_rank_)),
                Product(Dims(dims.begin() + group_rank, feature_axis_ - group_rank_)),
                dims[feature_axis_]};
      inner_ =
          Product(Dims(dims.begin() + feature_axis_ + 1, static_cast<std::size_t>(inner_rank)));
    }
  }

  // x's dimensions and dtype.
  RowChecker& Rows(std::string_view name, const ffi::AnyBuffer& buffer) {
    Check(name, buffer, x_.element_type(), x_.dimensions(), "x's shape and dtype");
    return *this;
  }

  // One value per row, in the accumulation dtype.
  RowChecker& Stat(std::string_view name, const ffi::AnyBuffer& buffer) {
    const auto dims = x_.dimensions();
    if (ok())
      Check(name, buffer, accum_dtype(), dims.first(dims.size() - 1),
            "x's shape without the last axis, in the accumulation dtype");
    return *this;
  }

  // Like Stat, but the operand may be absent. Then the result is null.
  void* OptionalStat(std::string_view name, const ffi::AnyBuffer& buffer) {
    if (!ok() || IsAbsent(buffer)) return nullptr;
    Stat(name, buffer);
    return buffer.untyped_data();
  }

  // Like Rows, but the operand may be absent. Then the result is null.
  void* OptionalRows(std::string_view name, const ffi::AnyBuffer& buffer) {
    if (!ok() || IsAbsent(buffer)) return nullptr;
    Rows(name, buffer);
    return buffer.untyped_data();
  }

  // Rules for two optional operands or results.
  RowChecker& BothOrNone(const char* name, const ffi::AnyBuffer& buffer, const char* other_name,
                         const ffi::AnyBuffer& other) {
    const bool right = IsAbsent(buffer) == IsAbsent(other);
    return Pair(right, "both there or both absent", name, buffer, other_name, other);
  }
  RowChecker& OneOf(const char* name, const ffi::AnyBuffer& buffer, const char* other_name,
                    const ffi::AnyBuffer& other) {
    const bool right = IsAbsent(buffer) != IsAbsent(other);
    return Pair(right, "one there and one absent", name, buffer, other_name, other);
  }
  RowChecker& Needs(const char* name, const ffi::AnyBuffer& buffer, const char* other_name,
                    const ffi::AnyBuffer& other) {
    const bool right = IsAbsent(buffer) || !IsAbsent(other);
    return Pair(right, "the latter there where the former is", name, buffer, other_name, other);
  }
  RowChecker& NotBoth(const char* name, const ffi::AnyBuffer& buffer, const char* other_name,
                      const ffi::AnyBuffer& other) {
    const bool right = IsAbsent(buffer) || IsAbsent(other);
    return Pair(right, "not both there", name, buffer, other_name, other);
  }

  // An attribute. It must be finite, and `valid` must be true.
  void Number(const char* name, double value, bool valid, const char* expected) {
    if (!ok() || (valid && std::isfinite(value))) return;
    message_ = op_ + ": " + name + " must be " + expected + ", got " + std::to_string(value);
  }

  // A parameter: [features], [groups..., features] or absent.
  Param OptionalParam(std::string_view name, const ffi::AnyBuffer& buffer, ParamDtype dtype) {
    return ok() && !IsAbsent(buffer) ? RequiredParam(name, buffer, dtype) : Param{};
  }

  // A parameter that must not be absent.
  Param RequiredParam(std::string_view name, const ffi::AnyBuffer& buffer, ParamDtype dtype) {
    if (!ok()) return {};
    const bool shared = buffer.dimensions().size() == 1;
    CheckParam(name, buffer, shared, dtype);
    return {buffer.untyped_data(), shared ? 0 : shape_.features, buffer.element_type()};
  }

  // A parameter's gradient: [groups..., features] or absent.
  ParamGrad OptionalParamGrad(std::string_view name, const ffi::AnyBuffer& buffer,
                              ParamDtype dtype) {
    if (!ok() || IsAbsent(buffer)) return {};
    CheckParam(name, buffer, /*shared=*/false, dtype);
    return {buffer.untyped_data(), buffer.element_type()};
  }

  // A statistic in the accumulation dtype: [groups..., features], or absent (null).
  void* OptionalFeatureStat(std::string_view name, const ffi::AnyBuffer& buffer) {
    return OptionalParamGrad(name, buffer, ParamDtype::kAccum).data;
  }

  // Scratch for column sums: [groups, partial rows, sums, features] in ScratchDtype. It is declared
  // by `column_sum_workspace` in jax_gradops/_kernel/invoke.py. Returns the number of partial rows.
  std::int64_t PartialRows(std::string_view name, const ffi::AnyBuffer& buffer, std::int64_t sums) {
    if (!ok() || sums == 0 || shape_.elements() == 0) return 0;
    const auto dims = buffer.dimensions();
    const bool matches = dims.size() == 4 && dims[0] == shape_.groups && dims[1] > 0 &&
                         dims[2] == sums && dims[3] == shape_.features &&
                         buffer.element_type() == ScratchDtype(dtype());
    if (!matches) {
      Fail(name,
           "shape [groups, partial rows, " + std::to_string(sums) + ", features] in " +
               Name(ScratchDtype(dtype())),
           buffer);
      return 0;
    }
    return dims[1];
  }

  bool ok() const { return message_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(message_); }
  const RowShape& shape() const { return shape_; }
  ChannelShape channel_shape() const { return {shape_, inner_}; }
  ffi::DataType dtype() const { return x_.element_type(); }
  ffi::DataType accum_dtype() const { return AccumDtype(x_.element_type()); }

 private:
  using Dims = ffi::Span<const std::int64_t>;

  bool IsAbsent(const ffi::AnyBuffer& buffer) const {
    const auto dims = buffer.dimensions();
    return dims.size() == 1 && dims[0] == 0 && buffer.element_type() == accum_dtype();
  }

  RowChecker& Pair(bool right, const char* expected, const char* name, const ffi::AnyBuffer& buffer,
                   const char* other_name, const ffi::AnyBuffer& other) {
    if (!ok() || right) return *this;
    message_ = op_ + ": " + name + " and " + other_name + " must be " + expected + ", got " +
               Describe(buffer) + " and " + Describe(other) + " with x " + Describe(x_);
    return *this;
  }

  void CheckParam(std::string_view name, const ffi::AnyBuffer& buffer, bool shared,
                  ParamDtype dtype) {
    const auto x_dims = x_.dimensions();
    const auto dims = buffer.dimensions();
    const std::size_t groups = shared ? 0 : group_rank_;
    bool matches = dims.size() == groups + 1 && dims.back() == x_dims[feature_axis_];
    for (std::size_t i = 0; matches && i < groups; ++i) matches = dims[i] == x_dims[i];
    const bool any = dtype == ParamDtype::kAnyFloat;
    const bool has_dtype =
        any ? IsFloat(buffer.element_type()) : buffer.element_type() == accum_dtype();
    if (!matches || !has_dtype) {
      Fail(name,
           "x's group axes and " + Feature() + ", in " +
               (any ? std::string("float16, bfloat16, float32 or float64")
                    : "the accumulation dtype " + Name(accum_dtype())),
           buffer);
    }
  }

  std::string Feature() const {
    return feature_axis_ + 1 == x_.dimensions().size() ? "last axis"
                                                       : "axis " + std::to_string(feature_axis_);
  }

  void Check(std::string_view name, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
             Dims expected, std::string_view what) {
    if (!ok()) return;
    const auto dims = buffer.dimensions();
    bool matches = dims.size() == expected.size() && buffer.element_type() == dtype;
    for (std::size_t i = 0; matches && i < dims.size(); ++i) matches = dims[i] == expected[i];
    if (!matches) Fail(name, what, buffer);
  }

  void Fail(std::string_view name, std::string_view expected, const ffi::AnyBuffer& got) {
    if (!ok()) return;
    message_ = op_ + ": " + std::string(name) + " must have " + std::string(expected) + "; got " +
               Describe(got) + " with x " + Describe(x_);
  }

  std::string op_;
  const ffi::AnyBuffer& x_;
  std::size_t group_rank_ = 0, feature_axis_ = 0;
  RowShape shape_{0, 0, 0};
  std::int64_t inner_ = 1;
  std::string message_;
};

}  // namespace gradops
