// Malformed calls. XLA makes no such call from a program that Python accepts.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <string_view>

#include "checks.h"

namespace gradops::native {
namespace {

class Malformed {
 public:
  explicit Malformed(const NamedHandler& handler) : handler_(handler) {}

  int Run();

 private:
  // Spoils the frame of a good call. The message must have the op's name and `expected`.
  void Refused(const char* what, const std::string& expected,
               const std::function<void(Frame&)>& spoil) {
    Frame frame(call_);
    spoil(frame);
    CheckRefused(what, expected, frame);
  }
  void CheckRefused(const char* what, const std::string& expected, Frame& frame);
  // Runs a call with a wrong attribute, dtype or dimension.
  void RefusedCall(const char* what, const std::string& expected,
                   const std::function<void(Call&)>& spoil) {
    Call call = call_;
    spoil(call);
    Frame frame(call);
    CheckRefused(what, expected, frame);
  }

  void Arrays();
  void Dimensions(std::size_t i, const std::string& expected);
  void Counts();
  void Attributes();
  void Frames();
  void CheckGood();

  NamedHandler handler_;
  Call call_;
  Pool pool_{Helpers::kNone, 1};
  int calls_ = 0, failures_ = 0;
};

void Malformed::CheckRefused(const char* what, const std::string& expected, Frame& frame) {
  ++calls_;
  const auto error = frame.Run(handler_.call, pool_);
  if (!error) {
    failures_ += Fail(call_, "%s (%s): was not refused", what, expected.c_str());
  } else if (error->code != XLA_FFI_Error_Code_INVALID_ARGUMENT ||
             !error->message.starts_with(call_.op + ": ") ||
             error->message.find(expected) == std::string::npos) {
    failures_ += Fail(call_, "%s: expected '%s: ... %s', got %d '%s'", what, call_.op.c_str(),
                      expected.c_str(), error->code, error->message.c_str());
  }
}

void Malformed::CheckGood() {
  Frame frame(call_);
  if (const auto error = frame.Run(handler_.call, pool_)) {
    failures_ += Fail(call_, "a good call: %s", error->message.c_str());
  }
}

// Messages use an array's name, or its number if the array itself is missing.
void Malformed::Arrays() {
  for (std::size_t i = 0; i < call_.arrays(); ++i) {
    const bool operand = i < call_.operands.size();
    const std::string number = operand ? "operand " + std::to_string(i)
                                       : "result " + std::to_string(i - call_.operands.size());
    const Array& array = call_.array(i);
    const auto buffer = [i](const auto& spoil) {
      return [i, spoil](Frame& frame) { spoil(frame.buffers[i]); };
    };
    Refused("no buffer", number, [i](Frame& frame) { frame.pointers[i] = nullptr; });
    Refused("size of struct", number, buffer([](auto& b) { b.struct_size -= sizeof(void*); }));
    Refused("rank", number, buffer([](auto& b) { b.rank = -1; }));
    Refused("rank", number,
            buffer([](auto& b) { b.rank = std::numeric_limits<std::int64_t>::min(); }));
    if (!array.dims.empty()) {
      Refused("dimensions", number, buffer([](auto& b) { b.dims = nullptr; }));
    }
    if (array.bytes() > 0) {
      Refused("data", number, buffer([](auto& b) { b.data = nullptr; }));
    }
    Refused("type", number, [&, i](Frame& frame) {
      if (operand) {
        frame.operand_types[i] = static_cast<XLA_FFI_ArgType>(0);
      } else {
        frame.result_types[i - call_.operands.size()] = static_cast<XLA_FFI_RetType>(0);
      }
    });
    // If two arrays do not fit together, the message may name either.
    const bool gives_length = array.name == "x" || array.name == "numbers";
    const bool ambiguous = gives_length || call_.op == "scale" || call_.op == "sum_of_squares";
    const std::string name = ambiguous ? "" : array.name;
    for (const XLA_FFI_DataType dtype :
         {XLA_FFI_DataType_INVALID, XLA_FFI_DataType_S32, XLA_FFI_DataType_PRED,
          XLA_FFI_DataType_C64, XLA_FFI_DataType_S4, XLA_FFI_DataType_TOKEN,
          XLA_FFI_DataType_F8E4M3FN, static_cast<XLA_FFI_DataType>(63)}) {
      if (dtype == array.dtype) continue;
      Refused("dtype", name, buffer([=](auto& b) { b.dtype = dtype; }));
    }
    if (!HasFreeDtype(call_.op, array.name)) {
      const bool is_float = array.dtype == XLA_FFI_DataType_F32;
      const auto other = is_float ? XLA_FFI_DataType_F16 : XLA_FFI_DataType_F32;
      Refused("other dtype", name, buffer([=](auto& b) { b.dtype = other; }));
    }
    Dimensions(i, name);
  }
}

void Malformed::Dimensions(std::size_t i, const std::string& name) {
  const Array& array = call_.array(i);
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  for (std::size_t d = 0; d < array.dims.size(); ++d) {
    const auto dim = [&](const char* what, std::int64_t value, const std::string& expected) {
      RefusedCall(what, expected, [=](Call& call) { call.array(i).dims[d] = value; });
    };
    for (const std::int64_t value : {std::int64_t{-1}, -kMost - 1, -kMost, -array.dims[d] - 1}) {
      dim("negative dimension", value, "negative dimension");
    }
    for (const std::int64_t value : {kMost, kMost / 2 + 1, std::int64_t{1} << 49}) {
      dim("huge dimension", value, "2^48 elements");
    }
    // The product modulo 2^64 of these dimensions is the old product or 0, or one of them is 0.
    RefusedCall("overflow", "2^48 elements", [=](Call& call) {
      auto& dims = call.array(i).dims;
      dims.insert(dims.begin() + static_cast<std::ptrdiff_t>(d),
                  {std::int64_t{1} << 32, std::int64_t{1} << 32});
    });
    RefusedCall("overflow", "2^48 elements", [=](Call& call) {
      auto& dims = call.array(i).dims;
      dims[d] = 0;
      dims.insert(dims.begin() + static_cast<std::ptrdiff_t>(d), {kMost, kMost});
    });
    const bool partial_rows = array.name == "workspace" && d == 1;
    if (HasFreeShape(call_.op, array.name) || partial_rows) continue;
    dim("dimension", array.dims[d] + 1, name);
    if (array.dims[d] > 1) dim("dimension", array.dims[d] - 1, name);
    // One axis of 0 elements stands for an absent operand.
    if (array.dims[d] > 0 && array.dims.size() > 1) dim("dimension", 0, name);
  }
  if (HasFreeShape(call_.op, array.name)) return;
  RefusedCall("rank", name, [=](Call& call) { call.array(i).dims.push_back(1); });
  RefusedCall("rank", name, [=](Call& call) {
    auto& dims = call.array(i).dims;
    dims.insert(dims.begin(), 1);
  });
  if (!array.dims.empty()) {
    RefusedCall("rank", name, [=](Call& call) { call.array(i).dims.pop_back(); });
    RefusedCall("scalar", name, [=](Call& call) { call.array(i).dims.clear(); });
  }
}

void Malformed::Counts() {
  const bool variadic = call_.op == "scale" || call_.op == "sum_of_squares";
  const auto operands = static_cast<std::int64_t>(call_.operands.size());
  const auto results = static_cast<std::int64_t>(call_.results.size());
  for (const std::int64_t n : {std::int64_t{-1}, std::int64_t{0}, operands - 1}) {
    if (operands == 0) break;  // then XLA's decoder does not check the number
    // sum_of_squares with fewer leaves is a good call.
    if (call_.op == "sum_of_squares" && n >= 0) continue;
    Refused("number of operands", variadic ? "" : "arguments",
            [=](Frame& frame) { frame.frame.args.size = n; });
  }
  for (const std::int64_t n : {std::int64_t{-1}, std::int64_t{0}, results - 1}) {
    Refused("number of results", variadic ? "" : "results",
            [=](Frame& frame) { frame.frame.rets.size = n; });
  }
  if (call_.op != "sum_of_squares" && operands > 0) {
    RefusedCall("an operand more", variadic ? "" : "arguments",
                [](Call& call) { call.operands.push_back(call.operands.back()); });
  }
  RefusedCall("a result more", variadic ? "" : "results",
              [](Call& call) { call.results.push_back(call.results.back()); });
}

void Malformed::Attributes() {
  for (std::size_t a = 0; a < call_.attributes.size(); ++a) {
    const Attribute attribute = call_.attributes[a];
    const auto value = [&](std::int64_t bits) {
      RefusedCall("value", attribute.name, [=](Call& call) { call.attributes[a].bits = bits; });
    };
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    if (attribute.dtype == XLA_FFI_DataType_S64) {
      for (const std::int64_t bits : {std::int64_t{-1}, std::int64_t{9}, kMost, -kMost - 1}) {
        value(bits);
      }
    } else if (attribute.dtype == XLA_FFI_DataType_F64) {
      std::vector<double> wrong{std::nan(""), INFINITY, -INFINITY};
      if (IsNonNegative(call_.op, attribute.name)) {
        wrong.insert(wrong.end(), {-1, -1e-300});
      }
      for (const double number : wrong) {
        std::int64_t bits;
        std::memcpy(&bits, &number, sizeof bits);
        value(bits);
      }
    }
    for (const XLA_FFI_DataType dtype : {XLA_FFI_DataType_F32, XLA_FFI_DataType_S32,
                                         XLA_FFI_DataType_U64, XLA_FFI_DataType_INVALID}) {
      RefusedCall("attribute's dtype", "scalar data type",
                  [=](Call& call) { call.attributes[a].dtype = dtype; });
    }
    for (const XLA_FFI_AttrType type :
         {XLA_FFI_AttrType_ARRAY, XLA_FFI_AttrType_DICTIONARY, XLA_FFI_AttrType_STRING}) {
      Refused("attribute's type", "attribute type",
              [=](Frame& frame) { frame.attribute_types[a] = type; });
    }
    RefusedCall("missing attribute", "attributes", [=](Call& call) {
      call.attributes.erase(call.attributes.begin() + static_cast<std::ptrdiff_t>(a));
    });
    RefusedCall("attribute's name", attribute.name,
                [=](Call& call) { call.attributes[a].name += "_"; });
    RefusedCall("attribute twice", "attributes", [=](Call& call) {
      call.attributes.insert(call.attributes.begin() + static_cast<std::ptrdiff_t>(a), attribute);
    });
  }
  if (call_.attributes.empty()) return;  // then XLA's decoder does not check the number
  Refused("number of attributes", "attributes", [](Frame& frame) { frame.frame.attrs.size = 0; });
  Refused("number of attributes", "attributes", [](Frame& frame) { frame.frame.attrs.size = -1; });
}

void Malformed::Frames() {
  for (const std::size_t size : {std::size_t{0}, std::size_t{XLA_FFI_CallFrame_STRUCT_SIZE} - 8,
                                 std::size_t{XLA_FFI_CallFrame_STRUCT_SIZE} + 8}) {
    Refused("size of frame", "XLA_FFI_CallFrame size",
            [=](Frame& frame) { frame.frame.struct_size = size; });
  }
  for (const auto stage : {XLA_FFI_ExecutionStage_INSTANTIATE, XLA_FFI_ExecutionStage_PREPARE,
                           XLA_FFI_ExecutionStage_INITIALIZE}) {
    Refused("stage", "stage", [=](Frame& frame) { frame.frame.stage = stage; });
  }
  // The call that XLA makes at registration.
  XLA_FFI_Metadata metadata{};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension{
      {XLA_FFI_Metadata_Extension_STRUCT_SIZE, XLA_FFI_Extension_Metadata, nullptr}, &metadata};
  const auto ask = [&](Frame& frame) { frame.frame.extension_start = &extension.extension_base; };
  Frame asked(call_);
  ask(asked);
  ++calls_;
  if (asked.Run(handler_.call, pool_) || metadata.api_version.major_version != XLA_FFI_API_MAJOR ||
      metadata.api_version.minor_version != XLA_FFI_API_MINOR ||
      metadata.traits != XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE) {
    failures_ += Fail(call_, "metadata: wrong version or traits");
  }
  metadata.struct_size -= sizeof(void*);
  Refused("size of metadata", "XLA_FFI_Metadata size", ask);
  extension.extension_base.struct_size -= sizeof(void*);
  Refused("size of extension", "XLA_FFI_Metadata_Extension size", ask);
}

int Malformed::Run() {
  // No two sizes are equal. The call is the one with the most operands.
  const Shape shape{.groups = {2}, .rows = {3, 7}, .features = 65, .inner = {11}};
  for (std::uint64_t seed = 0; seed < 64; ++seed) {
    Call call = MakeCall(handler_.name, XLA_FFI_DataType_F32, shape, Random(seed));
    const auto arrays = [](const Call& c) {
      std::size_t n = 0;
      for (std::size_t i = 0; i < c.arrays(); ++i) n += c.array(i).bytes() > 0;
      return n;
    };
    if (call_.op.empty() || arrays(call) > arrays(call_)) call_ = call;
  }
  const Heap memory(call_, Random(1), 0);
  std::vector<double> unused(64);
  for (std::size_t i = 0; i < call_.arrays(); ++i) {
    if (call_.array(i).data == nullptr) call_.array(i).data = unused.data();
  }
  CheckGood();
  Arrays();
  Counts();
  Attributes();
  Frames();
  if (handler_.name == std::string("sum_of_squares")) {
    Refused("alignment", "alignment of doubles", [&](Frame& frame) {
      XLA_FFI_Buffer& workspace = frame.buffers.back();
      workspace.data = static_cast<char*>(workspace.data) + sizeof(std::uint32_t);
    });
  }
  CheckGood();
  std::printf("malformed %s: %d calls\n", handler_.name, calls_);
  return failures_;
}

// With given statistics, batch norm and group norm compute only y. A call without y must be
// refused. XLA removes calls whose results have no elements, so only this driver makes such a call.
int CheckNothingWanted(const NamedHandler& handler) {
  const Shape shape{.groups = {}, .rows = {3}, .features = 5, .inner = {}};
  Pool pool(Helpers::kNone, 1);
  for (std::uint64_t seed = 0;; ++seed) {
    Call call = MakeCall(handler.name, XLA_FFI_DataType_F32, shape, Random(seed));
    const auto is_given = [](const Array& a) { return a.name == "mean" && a.bytes() > 0; };
    if (std::ranges::none_of(call.operands, is_given)) continue;
    call.results[0].dims = {0};
    const Heap memory(call, Random(seed), 0);
    const auto error = Frame(call).Run(handler.call, pool);
    const bool right = error && error->message.find("mean and y must") != std::string::npos;
    return right ? 0 : Fail(call, "nothing wanted: was not refused");
  }
}

// Good calls with 2^40 groups and no elements: a loop over the groups would not end in time. Calls
// with an array that would not fit in memory are left out.
int CheckManyEmptyGroups(const NamedHandler& handler) {
  const Shape shape{.groups = {std::int64_t{1} << 40}, .rows = {0}, .features = 5, .inner = {3}};
  int failures = 0, calls = 0;
  Pool pool(Helpers::kNone, 1);
  alarm(60);
  for (std::uint64_t seed = 0; seed < 256; ++seed) {
    Call call = MakeCall(handler.name, XLA_FFI_DataType_F32, shape, Random(seed));
    std::size_t most = 0;
    for (std::size_t i = 0; i < call.arrays(); ++i) most = std::max(most, call.array(i).bytes());
    if (most > 1000) continue;
    const Heap memory(call, Random(seed), 0);
    if (const auto error = Frame(call).Run(handler.call, pool)) {
      failures += Fail(call, "many groups: %s", error->message.c_str());
    }
    ++calls;
  }
  alarm(0);
  std::printf("many groups %s: %d calls\n", handler.name, calls);
  return failures;
}

}  // namespace

int CheckMalformed(Handlers handlers) {
  int failures = 0;
  for (const NamedHandler& handler : handlers) {
    failures += Malformed(handler).Run() + CheckManyEmptyGroups(handler);
    const std::string_view name = handler.name;
    if (name == "batch_norm_fwd" || name == "group_norm_fwd") {
      failures += CheckNothingWanted(handler);
    }
  }
  if (LeakedErrors() != 0) {
    std::printf("FAILED: %lld errors were not destroyed\n", static_cast<long long>(LeakedErrors()));
    ++failures;
  }
  return failures;
}

}  // namespace gradops::native
