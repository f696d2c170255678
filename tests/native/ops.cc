#include "ops.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "common/dtype.h"

namespace gradops::native {
namespace {

enum class Kind {
  kRows,         // has x's shape and dtype
  kStat,         // has one number per row, in the accumulation dtype
  kParam,        // [features] or [groups..., features], of any float dtype
  kAccumParam,   // [features] or [groups..., features], in the accumulation dtype
  kGrad,         // [groups..., features], of any float dtype
  kFeatureStat,  // [groups..., features], in the accumulation dtype
  kWorkspace,    // scratch for column sums
};

// An array is present if the option bits `set` are set and the bits `unset` are not.
struct When {
  unsigned set = 0, unset = 0;
};

struct Spec {
  const char* name;
  Kind kind;
  When when = {};
};

struct Op {
  const char* name;
  std::vector<Spec> operands, results;
  std::vector<std::pair<const char*, unsigned>> flags =
      {};  // boolean attributes, each with its option bit
  bool scale_offset = false, epsilon = false;
  bool in_place = false;  // the first result may take over the first operand's memory
  bool inner = false;     // x may have axes after the features
  int sums = 0;           // sums in the workspace; 0: one for each gradient
  unsigned not_both = 0;  // if all these options are set, none is used
};

constexpr unsigned Bit(int i) {
  return 1u << i;
}

// Option bits of the row norms: 0 residual or dsum, 1 scale, 2 bias, 3 dscale, 4 dbias, 5
// residual_bias or its gradient.
const When kSum{Bit(0)}, kScale{Bit(1)}, kBias{Bit(2)}, kDscale{Bit(3)}, kDbias{Bit(4)},
    kResidualBias{Bit(0) | Bit(5)}, kDresidualBias{Bit(5)};

const std::vector<Op>& Ops() {
  using enum Kind;
  static const std::vector<Op> ops{
      {.name = "layer_norm_fwd",
       .operands = {{"x", kRows},
                    {"residual", kRows, kSum},
                    {"residual_bias", kParam, kResidualBias},
                    {"scale", kParam, kScale},
                    {"bias", kParam, kBias}},
       .results = {{"y", kRows}, {"sum", kRows, kSum}, {"mean", kStat}, {"rstd", kStat}},
       .scale_offset = true,
       .epsilon = true},
      {.name = "layer_norm_bwd",
       .operands = {{"dy", kRows},
                    {"x", kRows},
                    {"dsum", kRows, kSum},
                    {"scale", kParam, kScale},
                    {"mean", kStat},
                    {"rstd", kStat}},
       .results = {{"dx", kRows},
                   {"dscale", kGrad, kDscale},
                   {"dbias", kGrad, kDbias},
                   {"dresidual_bias", kGrad, kDresidualBias},
                   {"workspace", kWorkspace}},
       .scale_offset = true,
       .epsilon = true},
      {.name = "layer_norm_bwd_from_output",
       .operands = {{"dy", kRows},
                    {"y", kRows},
                    {"dsum", kRows, kSum},
                    {"scale", kParam, kScale},
                    {"bias", kParam, kBias},
                    {"rstd", kStat}},
       .results = {{"dx", kRows},
                   {"dscale", kGrad, kDscale},
                   {"dbias", kGrad, kDbias},
                   {"dresidual_bias", kGrad, kDresidualBias},
                   {"workspace", kWorkspace}},
       .scale_offset = true},
      {.name = "rms_norm_fwd",
       .operands = {{"x", kRows},
                    {"residual", kRows, kSum},
                    {"residual_bias", kParam, kResidualBias},
                    {"scale", kParam, kScale}},
       .results = {{"y", kRows}, {"sum", kRows, kSum}, {"rstd", kStat}},
       .scale_offset = true,
       .epsilon = true},
      {.name = "rms_norm_bwd",
       .operands = {{"dy", kRows},
                    {"x", kRows},
                    {"dsum", kRows, kSum},
                    {"scale", kParam, kScale},
                    {"rstd", kStat}},
       .results = {{"dx", kRows},
                   {"dscale", kGrad, kDscale},
                   {"dresidual_bias", kGrad, kDresidualBias},
                   {"workspace", kWorkspace}},
       .scale_offset = true},
      {.name = "rms_norm_bwd_from_output",
       .operands = {{"dy", kRows},
                    {"y", kRows},
                    {"dsum", kRows, kSum},
                    {"scale", kParam, kScale},
                    {"rstd", kStat}},
       .results = {{"dx", kRows},
                   {"dscale", kGrad, kDscale},
                   {"dresidual_bias", kGrad, kDresidualBias},
                   {"workspace", kWorkspace}},
       .scale_offset = true},
      {.name = "bias_gelu_fwd",
       .operands = {{"x", kRows}, {"bias", kAccumParam, kBias}},
       .results = {{"y", kRows}},
       .flags = {{"approximate", Bit(0)}}},
      {.name = "bias_gelu_bwd",
       .operands = {{"dy", kRows}, {"x", kRows}, {"bias", kAccumParam, kBias}},
       .results = {{"dx", kRows}, {"dbias", kFeatureStat, kDbias}, {"workspace", kWorkspace}},
       .flags = {{"approximate", Bit(0)}},
       .in_place = true},
      // Bit 5: statistics or means are given.
      {.name = "batch_norm_fwd",
       .operands = {{"x", kRows},
                    {"residual", kRows, kSum},
                    {"scale", kParam, kScale},
                    {"bias", kParam, kBias},
                    {"mean", kAccumParam, {Bit(5)}},
                    {"rstd", kAccumParam, {Bit(5)}},
                    {"delta", kAccumParam, {Bit(5) | Bit(6)}}},
       .results = {{"y", kRows, {0, Bit(8)}},
                   {"batch_mean", kFeatureStat, {0, Bit(5)}},
                   {"batch_variance", kFeatureStat, {0, Bit(5)}},
                   {"batch_rstd", kFeatureStat, {0, Bit(5)}},
                   {"batch_delta", kFeatureStat, {0, Bit(5)}},
                   {"workspace", kWorkspace, {0, Bit(5)}}},
       .flags = {{"relu", Bit(7)}},
       .epsilon = true,
       .inner = true,
       .sums = 4,
       .not_both = Bit(5) | Bit(8)},
      {.name = "batch_norm_bwd",
       .operands = {{"dy", kRows},
                    {"x", kRows},
                    {"y", kRows, {Bit(8)}},
                    {"scale", kParam, kScale},
                    {"bias", kParam, kBias},
                    {"mean", kAccumParam},
                    {"rstd", kAccumParam},
                    {"delta", kAccumParam, {Bit(6)}},
                    {"mean_dz", kAccumParam, {Bit(5)}},
                    {"mean_dz_x_hat", kAccumParam, {Bit(5)}}},
       .results = {{"dx", kRows, {0, Bit(9)}},
                   {"dresidual", kRows, {Bit(0), Bit(9)}},
                   {"dscale", kGrad, {Bit(3), Bit(5)}},
                   {"dbias", kGrad, {Bit(4), Bit(5)}},
                   {"workspace", kWorkspace, {0, Bit(5)}}},
       .flags = {{"relu", Bit(7)}},
       .inner = true,
       .sums = 2},
  };
  return ops;
}

// Returns null for ops without a table: trees of arrays, and the copy.
const Op* Find(std::string_view name) {
  const auto found = std::ranges::find(Ops(), name, &Op::name);
  return found == Ops().end() ? nullptr : &*found;
}

XLA_FFI_DataType AccumOf(XLA_FFI_DataType dtype) {
  return dtype == XLA_FFI_DataType_F64 ? XLA_FFI_DataType_F64 : XLA_FFI_DataType_F32;
}
XLA_FFI_DataType ScratchOf(XLA_FFI_DataType dtype) {
  return dtype == XLA_FFI_DataType_F64 ? XLA_FFI_DataType_U64 : XLA_FFI_DataType_U32;
}
XLA_FFI_DataType AnyFloat(Random& random) {
  constexpr std::array kFloats{XLA_FFI_DataType_F32, XLA_FFI_DataType_F16, XLA_FFI_DataType_BF16,
                               XLA_FFI_DataType_F64};
  return kFloats[random.Below(4)];
}

using Dims = std::vector<std::int64_t>;
Dims operator+(Dims a, const Dims& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::int64_t Product(const Dims& dims) {
  std::int64_t n = 1;
  for (const std::int64_t dim : dims) n *= dim;
  return n;
}

Attribute Int(const char* name, std::int64_t value) {
  return {name, XLA_FFI_DataType_S64, value};
}

Call MakeRowCall(const Op& op, XLA_FFI_DataType dtype, const Shape& shape, Random& random) {
  auto options = static_cast<unsigned>(random());
  if ((options & op.not_both) == op.not_both) options &= ~op.not_both;
  const Dims inner = op.inner ? shape.inner : Dims{};
  const Dims x = shape.groups + shape.rows + Dims{shape.features} + inner;
  const Dims per_feature = shape.groups + Dims{shape.features};
  int grads = 0;
  const auto make = [&](const Spec& spec) -> Array {
    const bool there = (options & spec.when.set) == spec.when.set && !(options & spec.when.unset);
    const bool scratch = spec.kind == Kind::kWorkspace;
    const XLA_FFI_DataType accum = scratch ? ScratchOf(dtype) : AccumOf(dtype);
    const Array absent{spec.name, accum, {0}, scratch};
    if (!there) return absent;
    switch (spec.kind) {
      case Kind::kRows: return {spec.name, dtype, x};
      case Kind::kStat: return {spec.name, accum, Dims(x.begin(), x.end() - 1)};
      case Kind::kParam:
      case Kind::kAccumParam: {
        const bool any = spec.kind == Kind::kParam;
        return {spec.name, any ? AnyFloat(random) : accum,
                random.Below(2) == 0 ? Dims{shape.features} : per_feature};
      }
      case Kind::kFeatureStat: ++grads; return {spec.name, accum, per_feature};
      case Kind::kGrad: ++grads; return {spec.name, AnyFloat(random), per_feature};
      case Kind::kWorkspace: {
        const std::int64_t sums = op.sums > 0 ? op.sums : grads;
        if (sums == 0 || Product(x) == 0) return absent;
        constexpr std::array<std::int64_t, 4> kPartialRows{1, 2, 7, 64};
        return {spec.name,
                accum,
                {Product(shape.groups), kPartialRows[random.Below(4)], sums, shape.features},
                true};
      }
    }
    return absent;
  };
  Call call{.op = op.name};
  for (const Spec& spec : op.operands) call.operands.push_back(make(spec));
  for (const Spec& spec : op.results) call.results.push_back(make(spec));
  for (const auto& [name, bit] : op.flags) {
    call.attributes.push_back({name, XLA_FFI_DataType_PRED, (options & bit) != 0});
  }
  const auto number = [&](const char* name, double value) {
    call.attributes.push_back({name, XLA_FFI_DataType_F64, std::bit_cast<std::int64_t>(value)});
  };
  call.attributes.push_back(Int("group_rank", static_cast<std::int64_t>(shape.groups.size())));
  if (op.inner) {
    call.attributes.push_back(Int("inner_rank", static_cast<std::int64_t>(inner.size())));
  }
  if (op.scale_offset) number("scale_offset", random.Below(2) == 0 ? 0.0 : 1.0);
  if (op.epsilon) number("epsilon", 1e-5);
  return call;
}

// A call of sum_of_squares or scale with 0 to 4 leaves. One leaf may be empty.
Call MakeTreeCall(std::string_view op, XLA_FFI_DataType dtype, const Shape& shape, Random& random) {
  const bool scale = op == "scale";
  Call call{.op = std::string(op)};
  bool wide = false;
  for (std::uint64_t leaves = random.Below(5), i = 0; i < leaves; ++i) {
    Dims dims = shape.groups + (i == 1 ? shape.rows + Dims{shape.features} : Dims{});
    if (i == 0) dims.push_back(shape.features);
    if (i == 2) dims.push_back(Product(shape.rows));
    const XLA_FFI_DataType leaf = random.Below(3) > 0 ? dtype : AnyFloat(random);
    wide |= leaf == XLA_FFI_DataType_F64;
    call.operands.push_back({"leaf " + std::to_string(i), leaf, dims});
    if (scale) call.results.push_back({"scaled " + std::to_string(i), leaf, dims});
  }
  const XLA_FFI_DataType accum = wide ? XLA_FFI_DataType_F64 : XLA_FFI_DataType_F32;
  if (scale) {
    const bool double_factor = random.Below(2) == 0;
    const auto factor = double_factor ? XLA_FFI_DataType_F64 : XLA_FFI_DataType_F32;
    call.operands.push_back({"factor", factor, shape.groups});
    call.operands.push_back({"second_factor", factor, shape.groups});
  } else {
    for (const char* name : {"huge", "normal", "tiny"}) {
      call.results.push_back({name, accum, shape.groups});
    }
    const std::int64_t partials = Product(shape.groups) * (random.Below(2) == 0 ? 1 : 5);
    call.results.push_back({"workspace", ScratchOf(accum), {partials, wide ? 1 : 2}, true});
  }
  call.attributes.push_back(Int("group_rank", static_cast<std::int64_t>(shape.groups.size())));
  return call;
}

template <typename T>
void FillWith(const Array& array, Random& random, bool positive) {
  auto* const values = static_cast<T*>(array.data);
  for (std::size_t i = 0; i < array.bytes() / sizeof(T); ++i) {
    const float unit = static_cast<float>(random() >> 40) * 0x1p-24f;
    values[i] = static_cast<T>(positive ? 0.5f + unit : 4 * unit - 2);
  }
}

void FillOperand(const Array& array, Random random) {
  if (array.bytes() == 0) return;
  if (array.name.ends_with("factor") && random.Below(3) > 0) {
    if (array.dtype == XLA_FFI_DataType_F32) {
      std::fill_n(static_cast<float*>(array.data), array.bytes() / sizeof(float), 1.0f);
    } else {
      std::fill_n(static_cast<double*>(array.data), array.bytes() / sizeof(double), 1.0);
    }
    return;
  }
  const bool positive = array.name == "rstd";
  switch (array.dtype) {
    case XLA_FFI_DataType_F16: return FillWith<Half>(array, random, positive);
    case XLA_FFI_DataType_BF16: return FillWith<BFloat16>(array, random, positive);
    case XLA_FFI_DataType_F32: return FillWith<float>(array, random, positive);
    case XLA_FFI_DataType_F64: return FillWith<double>(array, random, positive);
    default: std::memset(array.data, 0x5a, array.bytes());
  }
}

// Writes some NaNs. Some of their bits are arbitrary.
void AddNaNs(const Array& array, Random random) {
  for (std::size_t i = 0; i < array.bytes() / 8; i += 1 + random.Below(50)) {
    if (array.dtype == XLA_FFI_DataType_F32) {
      static_cast<std::uint32_t*>(array.data)[i] =
          static_cast<std::uint32_t>(random()) | 0x7fc00000;
    } else if (array.dtype == XLA_FFI_DataType_F64) {
      static_cast<std::uint64_t*>(array.data)[i] = random() | 0x7ff8000000000000;
    }
  }
}

}  // namespace

Call MakeCall(std::string_view op, XLA_FFI_DataType dtype, const Shape& shape, Random random) {
  Call call{};
  if (op == "device_clock") {
    call = {
        .op = "device_clock",
        .results = {{.name = "ns", .dtype = XLA_FFI_DataType_U32, .dims = {2}, .scratch = true}}};
  } else if (op == "device_copy") {
    const Dims dims = shape.groups + shape.rows + Dims{shape.features};
    call = {.op = "device_copy", .operands = {{"x", dtype, dims}}, .results = {{"y", dtype, dims}}};
  } else if (op == "scale" || op == "sum_of_squares") {
    call = MakeTreeCall(op, dtype, shape, random);
  } else if (const Op* const known = Find(op)) {
    call = MakeRowCall(*known, dtype, shape, random);
  } else {
    std::fprintf(stderr, "tests/native/ops.cc: Ops() lacks %s\n", std::string(op).c_str());
    std::exit(1);
  }
  std::ranges::sort(call.attributes, {}, &Attribute::name);
  return call;
}

void FillOperands(const Call& call, Random random) {
  for (const Array& operand : call.operands) FillOperand(operand, Random(random()));
  // Only bias_gelu_fwd, which sums nothing, gets NaNs. A sum of several NaNs may be any of them.
  if (call.op == "bias_gelu_fwd") AddNaNs(call.operands[0], random);
}

bool HasFreeShape(std::string_view op, std::string_view name) {
  return name == "workspace" || (op == "sum_of_squares" && name.starts_with("leaf"));
}

bool HasFreeDtype(std::string_view op, std::string_view name) {
  if (op == "sum_of_squares") return name.starts_with("leaf");
  if (const Op* const known = Find(op)) {
    for (const auto& specs : {known->operands, known->results}) {
      for (const Spec& spec : specs) {
        if (name == spec.name) return spec.kind == Kind::kParam || spec.kind == Kind::kGrad;
      }
    }
  }
  return false;
}

bool MayBeInPlace(std::string_view op) {
  const Op* const known = Find(op);
  return known != nullptr ? known->in_place : op == "scale";
}

}  // namespace gradops::native
