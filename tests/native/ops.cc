#include "ops.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "common/dtype.h"

namespace gradops::native {
namespace {

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

// Whether each array is there, and the value of each boolean attribute, by name.
using Choice = std::map<std::string_view, bool, std::less<>>;

bool Allowed(const Signature& op, const Choice& choice) {
  return std::ranges::all_of(op.rules, [&](const Signature::Rule& rule) {
    if (!rule.when.empty() && !choice.at(rule.when)) return true;
    return rule.Allows(choice.at(rule.first), choice.at(rule.second));
  });
}

// Draws until the op's rules hold.
Choice Choose(const Signature& op, Random& random) {
  Choice choice;
  do {
    for (const auto& arrays : {op.operands, op.results}) {
      for (const Signature::Array& array : arrays) {
        choice[array.name] = array.presence == Presence::kRequired || random.Below(2) == 0;
      }
    }
    for (const Signature::Attribute& attribute : op.attributes) {
      if (attribute.type == Signature::Type::kBool) choice[attribute.name] = random.Below(2) == 0;
    }
  } while (!Allowed(op, choice));
  return choice;
}

// The axes without the groups, by letter. g is the number of bundles, v that of a table's rows.
class Axes {
 public:
  Axes(const Signature& op, const Shape& shape, Random& random) : shape_(shape) {
    if (op.name == "embedding_bwd") table_rows_ = static_cast<std::int64_t>(random.Below(20));
    if (std::ranges::none_of(op.operands, [](const auto& a) { return a.axes == "g"; })) return;
    // The smallest factor of the features is the number of bundles, or of a bundle's features.
    std::int64_t few = 2;
    while (few * few <= shape.features && shape.features % few != 0) ++few;
    if (shape.features % few != 0) few = shape.features;
    if (shape.features == 0) few = 3;
    const std::int64_t others = shape.features / few;
    bundles_ = random.Below(2) == 0 ? few : others;
  }
  Dims operator()(std::string_view letters) const {
    Dims dims;
    for (const char letter : letters) {
      dims = dims + (letter == 'n'   ? shape_.rows
                     : letter == 'm' ? shape_.inner
                     : letter == 'g' ? Dims{bundles_}
                     : letter == 'v' ? Dims{table_rows_}
                                     : Dims{shape_.features});
    }
    return dims;
  }

 private:
  const Shape& shape_;
  std::int64_t bundles_ = 0, table_rows_ = 0;
};

Call MakeRowCall(const Signature& op, XLA_FFI_DataType dtype, const Shape& shape, Random& random) {
  const Choice choice = Choose(op, random);
  const Axes axes(op, shape, random);
  std::int64_t sums = 0;
  const auto make = [&](const Signature::Array& array, bool operand) -> Array {
    const std::string name(array.name);
    if (!choice.at(array.name)) return {name, AccumOf(dtype), {0}};
    sums += !operand && !array.has_rows();
    const XLA_FFI_DataType its = array.dtype == DtypeRule::kAnyFloat ? AnyFloat(random)
                                 : array.dtype == DtypeRule::kInt32  ? XLA_FFI_DataType_S32
                                 : array.dtype == DtypeRule::kX      ? dtype
                                                                     : AccumOf(dtype);
    // All groups may share an operand without row axes.
    const bool shared = operand && !array.has_rows() && random.Below(2) == 0;
    return {name, its, (shared ? Dims{} : shape.groups) + axes(array.axes)};
  };
  Call call{.op = std::string(op.name)};
  for (const auto& array : op.operands) call.operands.push_back(make(array, /*operand=*/true));
  for (const auto& array : op.results) call.results.push_back(make(array, /*operand=*/false));
  if (op.workspace) {
    constexpr std::array<std::int64_t, 4> kPartialRows{1, 2, 7, 64};
    const bool empty = sums == 0 || Product(shape.groups + axes(op.operands[0].axes)) == 0;
    call.results.push_back(
        {"workspace", ScratchOf(dtype),
         empty ? Dims{0}
               : Dims{Product(shape.groups), kPartialRows[random.Below(4)], sums, shape.features},
         true});
  }
  call.attributes.push_back(Int("group_rank", static_cast<std::int64_t>(shape.groups.size())));
  if (op.has_inner()) {
    call.attributes.push_back(Int("inner_rank", static_cast<std::int64_t>(shape.inner.size())));
  }
  for (const Signature::Attribute& attribute : op.attributes) {
    const std::string name(attribute.name);
    switch (attribute.type) {
      case Signature::Type::kBool:
        call.attributes.push_back({name, XLA_FFI_DataType_PRED, choice.at(attribute.name)});
        break;
      case Signature::Type::kInt: call.attributes.push_back(Int(name.c_str(), 0)); break;
      case Signature::Type::kDouble:
        const double value = name == "epsilon" ? 1e-5 : random.Below(2) == 0 ? 0.0 : 1.0;
        call.attributes.push_back({name, XLA_FFI_DataType_F64, std::bit_cast<std::int64_t>(value)});
        break;
    }
  }
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

// Classes, and numbers of table rows, are consecutive, and each group has its own. Labels and
// indices are mostly small. Some are no class, and some are the ignored label.
void FillIntegers(const Array& array, Random& random) {
  auto* const values = static_cast<std::int32_t*>(array.data);
  const auto count = static_cast<std::int64_t>(array.bytes() / sizeof(std::int32_t));
  // fuzz.cc makes arrays without axes, too.
  const std::int64_t features = array.dims.empty() ? 1 : array.dims.back();
  for (std::int64_t i = 0; i < count; ++i) {
    if (array.name == "classes" || array.name == "numbers") {
      values[i] = static_cast<std::int32_t>(i % features + 3 * (i / features));
    } else {
      const auto label = static_cast<std::int32_t>(random.Below(2ull << random.Below(11)));
      values[i] = random.Below(6) == 0 ? kIgnoredLabel : label - 1;
    }
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
    case XLA_FFI_DataType_S32: return FillIntegers(array, random);
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

// The declaration of a handler.
const Signature& SignatureNamed(std::string_view op) {
  static const std::vector<Signature> all = SignaturesOf(DriverOps());
  const auto found = std::ranges::find(all, op, &Signature::name);
  if (found != all.end()) return *found;
  std::fprintf(stderr, "no handler is named %s\n", std::string(op).c_str());
  std::exit(1);
}

Call MakeCall(std::string_view op, XLA_FFI_DataType dtype, const Shape& shape, Random random) {
  Call call{};
  if (op == "device_clock") {
    call = {
        .op = "device_clock",
        .results = {{.name = "ns", .dtype = XLA_FFI_DataType_U32, .dims = {2}, .scratch = true}},
        .attributes = {{"wait_ms", XLA_FFI_DataType_F64, 0}}};
  } else if (op == "device_copy") {
    const Dims dims = shape.groups + shape.rows + Dims{shape.features};
    call = {.op = "device_copy", .operands = {{"x", dtype, dims}}, .results = {{"y", dtype, dims}}};
  } else if (SignatureNamed(op).variadic) {
    call = MakeTreeCall(op, dtype, shape, random);
  } else {
    call = MakeRowCall(SignatureNamed(op), dtype, shape, random);
  }
  std::ranges::sort(call.attributes, {}, &Attribute::name);
  return call;
}

void FillOperands(const Call& call, Random random) {
  for (const Array& operand : call.operands) FillOperand(operand, Random(random()));
  // Only bias_gelu_fwd, which sums nothing, gets NaNs. A sum of several NaNs may be any of them.
  if (call.op == "bias_gelu_fwd" && !call.operands.empty()) AddNaNs(call.operands[0], random);
}

bool HasFreeShape(std::string_view op, std::string_view name) {
  return name == "workspace" || (op == "sum_of_squares" && name.starts_with("leaf"));
}

bool HasFreeDtype(std::string_view op, std::string_view name) {
  if (op == "sum_of_squares") return name.starts_with("leaf");
  const Signature& signature = SignatureNamed(op);
  if (signature.variadic || op == "device_copy") return false;
  int of_x = 0;
  DtypeRule rule = DtypeRule::kAccum;
  for (const auto& arrays : {signature.operands, signature.results}) {
    for (const Signature::Array& array : arrays) {
      of_x += array.dtype == DtypeRule::kX;
      if (name == array.name) rule = array.dtype;
    }
  }
  return rule == DtypeRule::kAnyFloat || (rule == DtypeRule::kX && of_x == 1);
}

bool IsNonNegative(std::string_view op, std::string_view attribute) {
  return std::ranges::any_of(SignatureNamed(op).attributes, [&](const Signature::Attribute& a) {
    return a.name == attribute && a.non_negative;
  });
}

bool MayBeInPlace(std::string_view op) {
  return std::ranges::any_of(SignatureNamed(op).results, [](const Signature::Array& result) {
    return !result.in_place_of.empty();
  });
}

}  // namespace gradops::native
