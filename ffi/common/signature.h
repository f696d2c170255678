// A handler's declaration, as data: operands, results, attributes, and rules between them. The
// binding, the checks and the filled arguments of a call are made from it (RowHandler below). So
// are the calls of tests/native, and `signatures()` of the Python module.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "common/dtype.h"
#include "common/handler.h"
#include "common/shape.h"

namespace gradops {

// The dtypes that an array may have.
enum class DtypeRule {
  kX,         // the dtype of the operand "x"
  kAccum,     // the accumulation dtype
  kAnyFloat,  // any of the four float dtypes
  kInt32,
};

// An absent array has shape [0] and the accumulation dtype.
enum class Presence { kRequired, kOptional };

// An operand or a result.
//
// Letters name the axes: n is for the row axes (any number), d for the features, and m for the axes
// after the features. m is a row axis, too. The attribute inner_rank says how many axes m has. Any
// other letter stands for one axis. x does not have the axis v: the first array with the axes v
// gives its size. g is the axis of bundles. A bundle is some neighbouring features, and all bundles
// are equally large. x has no axis g. The last axis of the first array with axes g that is there
// gives the number of bundles. The group axes (of jax.vmap) come before all. An operand without n
// may lack the group axes: all groups then share it.
struct Signature {
  struct Array {
    std::string_view name, axes;
    DtypeRule dtype;
    Presence presence;
    std::string_view in_place_of = "";  // the operand whose memory a result may take over, or ""

    bool has_rows() const { return axes.find('n') != axes.npos; }
  };
  enum class Type { kBool, kInt, kDouble };
  struct Attribute {
    std::string_view name;
    Type type;
    bool non_negative;
  };
  // How two optional arrays depend on each other. A boolean attribute counts as an array that is
  // there if it is true.
  struct Rule {
    enum Kind { kBothOrNone, kOneOf, kNeeds, kNotBoth };
    std::string_view first;
    Kind kind;
    std::string_view second;
    std::string_view when = "";  // the rule holds only if this boolean attribute is true

    bool Allows(bool has_first, bool has_second) const {
      switch (kind) {
        case kBothOrNone: return has_first == has_second;
        case kOneOf: return has_first != has_second;
        case kNeeds: return !has_first || has_second;
        case kNotBoth: return !has_first || !has_second;
      }
      return false;
    }
    std::string_view text() const {
      switch (kind) {
        case kBothOrNone: return "both there or both absent";
        case kOneOf: return "one there and one absent";
        case kNeeds: return "the latter there where the former is";
        case kNotBoth: return "not both there";
      }
      return "";
    }
  };

  std::string_view name;
  std::vector<Array> operands, results;
  std::vector<Attribute> attributes = {};  // without group_rank and inner_rank
  std::vector<Rule> rules = {};
  // Whether a last result is scratch for sums over rows: [groups, partial rows, sums, features] in
  // ScratchDtype, with one sum for each result without n. It has shape [0] without such results.
  bool workspace = false;
  // Whether the first operand stands for any number of arrays. All have the axes n, and any dtypes.
  // If the first result has the axes n, each of the arrays has one result.
  bool variadic = false;

  bool has_inner() const {
    return std::ranges::any_of(operands, [](const Array& a) { return a.axes.ends_with('m'); });
  }
};

// An operand or a result, and the member of Args that it is stored in.
template <class Args>
struct BufferOf {
  const char *name, *axes;
  DtypeRule dtype;
  std::variant<const void* Args::*, void* Args::*, Param Args::*, ParamGrad Args::*> member;
  Presence presence = Presence::kRequired;
  const char* in_place_of = "";
};

template <class Args>
struct AttributeOf {
  const char* name;
  std::variant<bool Args::*, std::int64_t Args::*, double Args::*> member;
  bool non_negative = false;
};

// An op is a struct with a kName. A row-wise op has its arguments' type Args, the tables kOperands
// and kResults, kAttributes and kRules, and Launch(context, args). RowHandler makes its handler.
// Any other op has Declare(), which returns a Signature, and its own Bind and Run.
template <class Op>
concept RowOp = requires { Op::kOperands; };

template <class Op>
Signature SignatureOf()
  requires(!RowOp<Op>)
{
  return Op::Declare();
}

template <RowOp Op>
Signature SignatureOf() {
  const auto arrays = [](const auto& buffers) {
    std::vector<Signature::Array> found;
    for (const auto& b : buffers) {
      found.push_back({b.name, b.axes, b.dtype, b.presence, b.in_place_of});
    }
    return found;
  };
  Signature signature{
      .name = Op::kName, .operands = arrays(Op::kOperands), .results = arrays(Op::kResults)};
  for (const auto& a : Op::kAttributes) {
    signature.attributes.push_back(
        {a.name, static_cast<Signature::Type>(a.member.index()), a.non_negative});
  }
  for (const Signature::Rule& rule : Op::kRules) signature.rules.push_back(rule);
  signature.workspace = requires { &Op::Args::workspace; };
  return signature;
}

// Checks the buffers of one call against x, and remembers the first mistake.
class RowChecker {
 public:
  RowChecker(std::string_view op, const ffi::AnyBuffer& x, std::string_view axes,
             std::int64_t group_rank, std::int64_t inner_rank)
      : op_(op), x_(x), axes_(axes), inner_rank_(inner_rank) {
    const auto rank = static_cast<std::int64_t>(x.dimensions().size());
    if (!IsFloat(x.element_type())) {
      Fail("x", "float16, bfloat16, float32 or float64", x);
    } else if (group_rank < 0 || group_rank > rank - 1) {
      message_ = op_ + ": attribute group_rank must be in [0, rank of x), got " +
                 std::to_string(group_rank) + " for x " + Describe(x);
    } else if (inner_rank < 0 || inner_rank > rank - 1 - group_rank) {
      message_ = op_ + ": attribute inner_rank must be in [0, rank of x - group_rank), got " +
                 std::to_string(inner_rank) + " for x " + Describe(x);
    } else {
      group_rank_ = group_rank;
      row_rank_ = rank - group_rank - 1 - inner_rank;
      shape_ = {Product(Dims(x.dimensions().begin(), static_cast<std::size_t>(group_rank))),
                Product(DimsOf('n')), Product(DimsOf('d'))};
      inner_ = Product(DimsOf('m'));
      bundles_ = shape_.features;
    }
  }

  // The number of bundles is the size of this array's last axis.
  void SetBundles(std::string_view name, const ffi::AnyBuffer& buffer) {
    if (!ok()) return;
    const auto dims = buffer.dimensions();
    bundles_ = dims.size() == 0 ? 0 : dims.back(), gives_bundles_ = name;
    bundle_ = shape_.features / std::max<std::int64_t>(1, bundles_);
    if (bundles_ * bundle_ != shape_.features) {
      Fail(name, "a last axis that divides x's axis " + FeatureAxis(), buffer);
    }
  }

  // The size of the axis v is that of this array's last axis.
  void SetTableRows(const ffi::AnyBuffer& buffer) {
    const auto dims = buffer.dimensions();
    table_rows_ = dims.size() == 0 ? 0 : dims.back();
  }

  // Whether an array that is there looks as if it were absent.
  bool IsEmpty(const Signature::Array& array) const {
    return std::ranges::any_of(array.axes,
                               [this](char letter) { return Product(DimsOf(letter)) == 0; });
  }

  // Whether the array is there. An optional array that is empty may count as absent.
  bool IsThere(Presence presence, const ffi::AnyBuffer& buffer) const {
    const auto dims = buffer.dimensions();
    return presence == Presence::kRequired || dims.size() != 1 || dims[0] != 0 ||
           buffer.element_type() != AccumDtype(dtype());
  }

  // Returns the distance of two groups in the array, in elements: 0 if all groups share it.
  std::int64_t Check(const Signature::Array& array, const ffi::AnyBuffer& buffer, bool is_operand) {
    if (!ok()) return 0;
    const auto dims = buffer.dimensions();
    std::int64_t rank = 0, elements = 1;
    for (const char letter : array.axes) {
      rank += RankOf(letter);
      elements *= Product(DimsOf(letter));
    }
    const bool shared =
        is_operand && !array.has_rows() && static_cast<std::int64_t>(dims.size()) == rank;
    const std::size_t groups = shared ? 0 : static_cast<std::size_t>(group_rank_);
    bool matches = dims.size() == groups + static_cast<std::size_t>(rank);
    std::size_t next = 0;
    const auto take = [&](Dims expected) {
      matches = matches && std::ranges::equal(expected, Dims(dims.begin() + next, expected.size()));
      next += expected.size();
    };
    take(x_.dimensions().first(groups));
    for (const char letter : array.axes) take(DimsOf(letter));
    if (!matches || !HasDtype(array.dtype, buffer.element_type()))
      Fail(array.name, Expected(array), buffer);
    return shared ? 0 : elements;
  }

  // Returns the number of partial rows in the scratch for this number of sums.
  std::int64_t PartialRows(const ffi::AnyBuffer& buffer, std::int64_t sums) {
    if (!ok() || sums == 0 || shape_.elements() * inner_ == 0) return 0;
    const auto dims = buffer.dimensions();
    const ffi::DataType scratch = ScratchDtype(dtype());
    if (dims.size() == 4 && dims[0] == shape_.groups && dims[1] > 0 && dims[2] == sums &&
        dims[3] == shape_.features && buffer.element_type() == scratch) {
      return dims[1];
    }
    Fail("workspace",
         "shape [groups, partial rows, " + std::to_string(sums) + ", features] in " + Name(scratch),
         buffer);
    return 0;
  }

  void Number(std::string_view name, double value, bool non_negative) {
    if (!ok() || (std::isfinite(value) && (value >= 0 || !non_negative))) return;
    message_ = op_ + ": " + std::string(name) + " must be finite" +
               (non_negative ? " and >= 0" : "") + ", got " + std::to_string(value);
  }

  void Broken(const Signature::Rule& rule, const std::string& first, const std::string& second) {
    if (!ok()) return;
    message_ = op_ + ": " + std::string(rule.first) + " and " + std::string(rule.second) +
               " must be " + std::string(rule.text()) + ", got " + first + " and " + second +
               " with x " + Describe(x_);
  }

  bool ok() const { return message_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(message_); }
  ChannelShape shape() const { return {shape_, inner_}; }
  std::int64_t bundle() const { return bundle_; }
  std::int64_t bundles() const { return bundles_; }
  std::int64_t table_rows() const { return table_rows_; }
  ffi::DataType dtype() const { return x_.element_type(); }

 private:
  using Dims = ffi::Span<const std::int64_t>;

  bool HasDtype(DtypeRule rule, ffi::DataType found) const {
    switch (rule) {
      case DtypeRule::kX: return found == dtype();
      case DtypeRule::kAccum: return found == AccumDtype(dtype());
      case DtypeRule::kAnyFloat: return IsFloat(found);
      case DtypeRule::kInt32: return found == ffi::S32;
    }
    return false;
  }

  // x's dimensions along the axes of a letter. Those of g and v are not x's.
  Dims DimsOf(char letter) const {
    if (letter == 'g') return Dims(&bundles_, 1);
    if (letter == 'v') return Dims(&table_rows_, 1);
    std::int64_t start = group_rank_;
    for (const char before : axes_.substr(0, axes_.find(letter))) start += RankOf(before);
    return Dims(x_.dimensions().begin() + start, static_cast<std::size_t>(RankOf(letter)));
  }
  std::int64_t RankOf(char letter) const {
    return letter == 'n' ? row_rank_ : letter == 'm' ? inner_rank_ : 1;
  }

  // The number of the features' axis in x.
  std::string FeatureAxis() const { return std::to_string(group_rank_ + row_rank_); }

  std::string Expected(const Signature::Array& array) const {
    std::string shape = "x's shape";
    const std::string feature = inner_rank_ == 0 ? "last axis" : "axis " + FeatureAxis();
    if (array.axes == "g") {
      shape = "x's group axes and one of size " + std::to_string(bundles_);
      if (array.name != gives_bundles_) shape += ", as " + std::string(gives_bundles_) + " has";
    } else if (array.axes.starts_with('v')) {
      shape = "x's group axes and one of size " + std::to_string(table_rows_);
      if (array.axes == "vd") shape += ", and x's " + feature;
    } else if (!array.has_rows()) {
      shape = "x's group axes and " + feature;
    } else if (array.axes != axes_) {
      shape += " without the " + feature;
    }
    switch (array.dtype) {
      case DtypeRule::kX: return shape + " and dtype";
      case DtypeRule::kAnyFloat: return shape + ", in float16, bfloat16, float32 or float64";
      case DtypeRule::kInt32: return shape + ", in int32";
      case DtypeRule::kAccum: break;
    }
    return shape + ", in the accumulation dtype " + Name(AccumDtype(dtype()));
  }

  void Fail(std::string_view name, std::string_view expected, const ffi::AnyBuffer& got) {
    message_ = op_ + ": " + std::string(name) + " must have " + std::string(expected) + "; got " +
               Describe(got) + " with x " + Describe(x_);
  }

  std::string op_;
  const ffi::AnyBuffer& x_;
  std::string_view axes_;
  std::int64_t group_rank_ = 0, row_rank_ = 0, inner_rank_;
  RowShape shape_{0, 0, 0};
  std::int64_t inner_ = 1, bundle_ = 1, bundles_ = 0, table_rows_ = 0;
  std::string_view gives_bundles_;
  std::string message_;
};

// The handler of a row-wise op: its binding, and the function that XLA calls. It checks the call,
// fills Op::Args and calls Op::Launch.
template <class Context, RowOp Op>
class RowHandler {
  using Args = typename Op::Args;
  static constexpr std::size_t kOperands = std::size(Op::kOperands);
  static constexpr std::size_t kResults = std::size(Op::kResults);
  static constexpr std::size_t kArrays = kOperands + kResults;
  static constexpr bool kWorkspace = requires { &Args::workspace; };
  static constexpr bool kInner = std::string_view(Op::kOperands[0].axes).ends_with('m');

 public:
  static auto Bind() {
    auto ranks = gradops::Bind<Context>().template Attr<std::int64_t>("group_rank");
    if constexpr (kInner) {
      return BindRest(std::move(ranks).template Attr<std::int64_t>("inner_rank"));
    } else {
      return BindRest(std::move(ranks));
    }
  }

  // Takes what `Bind` decodes: ranks, attributes, operands, results.
  struct Run {
    template <class... Values>
    ffi::Error operator()(Context ctx, std::int64_t group_rank, Values... values) const {
      RowHandler call(group_rank);
      call.Take(std::tie(values...), std::index_sequence_for<Values...>());
      const ffi::Error error = call.Check();
      return error.success() ? Op::Launch(ctx, call.args_) : error;
    }
  };

 private:
  explicit RowHandler(std::int64_t group_rank) : group_rank_(group_rank) {}

  template <std::size_t kNext = 0, class Binding>
  static auto BindRest(Binding&& binding) {
    if constexpr (kNext < std::size(Op::kAttributes)) {
      constexpr auto kType = static_cast<Signature::Type>(Op::kAttributes[kNext].member.index());
      using T = std::conditional_t<
          kType == Signature::Type::kBool, bool,
          std::conditional_t<kType == Signature::Type::kInt, std::int64_t, double>>;
      return BindRest<kNext + 1>(std::move(binding).template Attr<T>(Op::kAttributes[kNext].name));
    } else {
      return Buffers<kOperands, kResults + kWorkspace>(std::move(binding));
    }
  }

  template <class Values, std::size_t... kPlaces>
  void Take(Values values, std::index_sequence<kPlaces...>) {
    (TakeOne<kPlaces>(std::get<kPlaces>(values)), ...);
  }
  template <std::size_t kPlace, class Value>
  void TakeOne(Value& value) {
    constexpr std::size_t kFirstAttribute = kInner ? 1 : 0;
    constexpr std::size_t kFirstBuffer = kFirstAttribute + std::size(Op::kAttributes);
    if constexpr (kPlace < kFirstAttribute) {
      inner_rank_ = value;
    } else if constexpr (kPlace < kFirstBuffer) {
      args_.*std::get<Value Args::*>(Op::kAttributes[kPlace - kFirstAttribute].member) = value;
    } else if constexpr (std::is_same_v<Value, Out>) {
      buffers_[kPlace - kFirstBuffer] = &*value;
    } else {
      buffers_[kPlace - kFirstBuffer] = &value;
    }
  }

  static constexpr Signature::Array ArrayAt(std::size_t i) {
    const BufferOf<Args>& b = i < kOperands ? Op::kOperands[i] : Op::kResults[i - kOperands];
    return {b.name, b.axes, b.dtype, b.presence, b.in_place_of};
  }

  ffi::Error Check() {
    constexpr std::size_t kX = [] {
      for (std::size_t i = 0; i < kOperands; ++i) {
        if (std::string_view(Op::kOperands[i].name) == "x") return i;
      }
      return kOperands;
    }();
    RowChecker check(Op::kName, *buffers_[kX], Op::kOperands[kX].axes, group_rank_, inner_rank_);
    if (!check.ok()) return check.error();
    args_.dtype = check.dtype();
    if constexpr (requires { args_.shape.inner; }) {
      args_.shape = check.shape();
    } else {
      args_.shape = check.shape().outer;
    }
    if constexpr (requires { args_.bundle; }) {
      if (const auto* array = FirstWithAxes("g", check)) {
        const auto i = static_cast<std::size_t>(array - buffers_.data());
        check.SetBundles(ArrayAt(i).name, **array);
      }
      args_.bundle = check.bundle(), args_.bundles = check.bundles();
    }
    if constexpr (requires { args_.table_rows; }) {
      if (const auto* array = FirstWithAxes("v", check)) check.SetTableRows(**array);
      args_.table_rows = check.table_rows();
    }
    std::int64_t sums = 0;
    CheckArrays(check, sums, std::make_index_sequence<kArrays>());
    CheckRules(check, std::make_index_sequence<std::size(Op::kRules)>());
    for (const AttributeOf<Args>& attribute : Op::kAttributes) {
      if (!std::holds_alternative<double Args::*>(attribute.member)) continue;
      const double value = args_.*std::get<double Args::*>(attribute.member);
      check.Number(attribute.name, value, attribute.non_negative);
    }
    if constexpr (kWorkspace) {
      const ffi::AnyBuffer& workspace = *buffers_[kArrays];
      args_.workspace = workspace.untyped_data();
      args_.partial_rows = check.PartialRows(workspace, sums);
    }
    return check.ok() ? ffi::Error::Success() : check.error();
  }

  // The place of the first array that is there and has exactly these axes, or null.
  const ffi::AnyBuffer* const* FirstWithAxes(std::string_view axes, const RowChecker& check) const {
    for (std::size_t i = 0; i < kArrays; ++i) {
      const Signature::Array array = ArrayAt(i);
      if (array.axes == axes && check.IsThere(array.presence, *buffers_[i])) return &buffers_[i];
    }
    return nullptr;
  }

  // Checks each array and stores it in its member. Counts the sums over rows that are wanted.
  template <std::size_t... kAll>
  void CheckArrays(RowChecker& check, std::int64_t& sums, std::index_sequence<kAll...>) {
    (CheckArray<kAll>(check, sums), ...);
  }
  template <std::size_t i>
  void CheckArray(RowChecker& check, std::int64_t& sums) {
    constexpr BufferOf<Args> kDeclared = i < kOperands
                                             ? Op::kOperands[i < kOperands ? i : 0]
                                             : Op::kResults[i < kOperands ? 0 : i - kOperands];
    constexpr auto kMember = std::get<kDeclared.member.index()>(kDeclared.member);
    constexpr Signature::Array kArray = ArrayAt(i);
    const ffi::AnyBuffer& buffer = *buffers_[i];
    const bool there = check.IsThere(kArray.presence, buffer);
    const std::int64_t stride = there ? check.Check(kArray, buffer, i < kOperands) : 0;
    void* const data = there ? buffer.untyped_data() : nullptr;
    const ffi::DataType dtype = there ? buffer.element_type() : ffi::DataType::INVALID;
    sums += i >= kOperands && there && !kArray.has_rows();
    if constexpr (std::is_same_v<decltype(kMember), Param Args::* const>) {
      args_.*kMember = {data, stride, dtype};
    } else if constexpr (std::is_same_v<decltype(kMember), ParamGrad Args::* const>) {
      args_.*kMember = {data, dtype};
    } else {
      args_.*kMember = data;
    }
  }

  // What a rule is about: the number of an array (operands, then results), or of an attribute plus
  // the number of arrays.
  static consteval std::size_t Find(std::string_view name) {
    std::size_t i = 0;
    for (const auto& operand : Op::kOperands) {
      if (name == operand.name) return i;
      ++i;
    }
    for (const auto& result : Op::kResults) {
      if (name == result.name) return i;
      ++i;
    }
    for (const auto& attribute : Op::kAttributes) {
      if (name == attribute.name && attribute.member.index() == 0) return i;
      ++i;
    }
    throw "a rule names what the op does not have";
  }

  template <std::size_t... kRules>
  void CheckRules(RowChecker& check, std::index_sequence<kRules...>) const {
    (CheckRule<kRules>(check), ...);
  }
  template <std::size_t kRule>
  void CheckRule(RowChecker& check) const {
    constexpr Signature::Rule rule = Op::kRules[kRule];
    constexpr std::size_t kFirst = Find(rule.first), kSecond = Find(rule.second);
    if constexpr (!rule.when.empty()) {
      if (!IsThere(check, Find(rule.when))) return;
    }
    const auto unclear = [&](std::size_t i) { return i < kArrays && check.IsEmpty(ArrayAt(i)); };
    if (unclear(kFirst) || unclear(kSecond) ||
        rule.Allows(IsThere(check, kFirst), IsThere(check, kSecond))) {
      return;
    }
    const auto describe = [&](std::size_t i) {
      if (i < kArrays) return Describe(*buffers_[i]);
      return std::string(IsThere(check, i) ? "true" : "false");
    };
    check.Broken(rule, describe(kFirst), describe(kSecond));
  }

  bool IsThere(const RowChecker& check, std::size_t i) const {
    if (i < kArrays) return check.IsThere(ArrayAt(i).presence, *buffers_[i]);
    return args_.*std::get<bool Args::*>(Op::kAttributes[i - kArrays].member);
  }

  Args args_{};
  std::int64_t group_rank_, inner_rank_ = 0;
  std::array<const ffi::AnyBuffer*, kArrays + kWorkspace> buffers_{};
};

struct NamedHandler {
  const char* name;
  XLA_FFI_Handler* call;
};

// The function that XLA calls.
//
// CUDA handlers only put work on the given stream: no allocation, no synchronisation, no branch on
// device data. So XLA may record them into a CUDA graph. The trait says so. The CPU ignores the
// trait.
template <class Context, class Op>
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame) {
  static ffi::Ffi* const handler = []() -> ffi::Ffi* {
    constexpr auto kTrait = ffi::Traits::kCmdBufferCompatible;
    if constexpr (RowOp<Op>) {
      using Handler = RowHandler<Context, Op>;
      return Handler::Bind().To(typename Handler::Run(), {kTrait}).release();
    } else {
      return Op::template Bind<Context>().To(&Op::template Run<Context>, {kTrait}).release();
    }
  }();
  return Call(Op::kName, *handler, frame);
}

// The handlers and the declarations of a list of ops.
template <class Context, class... Ops>
std::vector<NamedHandler> HandlersOf(TypeList<Ops...>) {
  return {{Ops::kName, &Handle<Context, Ops>}...};
}
template <class... Ops>
std::vector<Signature> SignaturesOf(TypeList<Ops...>) {
  return {SignatureOf<Ops>()...};
}

}  // namespace gradops
