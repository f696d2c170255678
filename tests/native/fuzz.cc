// A fuzzer of call frames for clang's libFuzzer. Bytes choose a good call, and then mistakes in
// this call. Arrays have exactly their sizes. The handler must refuse the call, or stay within the
// arrays and write all results.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "checks.h"

namespace gradops::native {
namespace {

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}
  bool any() const { return left_ > 0; }
  std::size_t Below(std::size_t n) {
    if (left_ == 0 || n == 0) return 0;
    --left_;
    return *data_++ % n;
  }
  std::int64_t Number() {
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    constexpr std::array<std::int64_t, 16> kSpecial{-1,
                                                    -2,
                                                    kMost,
                                                    -kMost - 1,
                                                    kMost / 2 + 1,
                                                    std::int64_t{1} << 32,
                                                    std::int64_t{1} << 48,
                                                    (std::int64_t{1} << 48) + 1,
                                                    1 << 31,
                                                    4,
                                                    8,
                                                    9,
                                                    1 << 16,
                                                    -(std::int64_t{1} << 32),
                                                    255,
                                                    6};
    const std::size_t kind = Below(256);
    if (kind < 128) return Small(kind);
    if (kind < 240) return kSpecial[kind % kSpecial.size()];
    std::int64_t number = 0;
    for (int i = 0; i < 8; ++i) number = number << 8 | static_cast<std::int64_t>(Below(256));
    return number;
  }
  std::int64_t Size() { return Small(Below(256)); }

 private:
  static std::int64_t Small(std::size_t kind) {
    constexpr std::array<std::int64_t, 16> kSizes{1,  2,  3,  0,   5,   7,   16, 17,
                                                  31, 33, 64, 127, 129, 257, 1,  2};
    return kSizes[kind % kSizes.size()];
  }

  const std::uint8_t* data_;
  std::size_t left_;
};

constexpr std::int64_t kMostElements = 1 << 13;

// Whether an array can be allocated. If not, whether it has too many elements or is malformed.
enum class Extent { kUsable, kLarge, kMalformed };
Extent ExtentOf(const Array& array) {
  std::int64_t elements = 1;
  bool empty = false;
  for (const std::int64_t dim : array.dims) {
    if (dim < 0 || dim > kMaxElements / elements) return Extent::kMalformed;
    elements *= std::max<std::int64_t>(1, dim);
    empty |= dim == 0;
  }
  return empty || elements <= kMostElements ? Extent::kUsable : Extent::kLarge;
}

// XLA's header knows only the widths of dtypes that it names.
bool HasWidth(const Array& array) {
  const auto dtype = static_cast<ffi::DataType>(array.dtype);
  return IsFloat(dtype) || dtype == ffi::S32 || dtype == ffi::U8 || dtype == ffi::U32 ||
         dtype == ffi::U64;
}

// Arrays of exactly their sizes.
class Memory {
 public:
  Memory(Call& call, const std::vector<bool>& without, Random random, int poison) {
    Call filled{.op = call.op};
    for (std::size_t i = 0; i < call.arrays(); ++i) {
      Array& array = call.array(i);
      const Extent extent = ExtentOf(array);
      // Large arrays get no memory. A handler must not touch malformed arrays.
      const bool usable = extent == Extent::kUsable && HasWidth(array);
      array.data = without[i] || extent == Extent::kLarge
                       ? nullptr
                       : Allocate(usable ? array.bytes() : 1, poison);
      if (usable && array.data != nullptr) filled.operands.push_back(array);
      if (i + 1 == call.operands.size()) FillOperands(filled, random);
    }
  }
  ~Memory() {
    for (void* const block : blocks_) std::free(block);
  }

 private:
  void* Allocate(std::size_t bytes, int poison) {
    void* const block = std::malloc(bytes);
    blocks_.push_back(block);
    return std::memset(block, poison, bytes);
  }

  std::vector<void*> blocks_;
};

// A malformation of the frame itself. Both runs of a call get it.
struct Spoilt {
  int what = 0;
  std::size_t which = 0;
  std::int64_t number = 0;
  void operator()(Frame& frame) const {
    const std::size_t i = frame.buffers.empty() ? 0 : which % frame.buffers.size();
    if (frame.buffers.empty() && what >= 4 && what <= 8) return;
    switch (what) {
      case 1: frame.frame.struct_size += static_cast<std::size_t>(number % 64); break;
      case 2: frame.frame.stage = static_cast<XLA_FFI_ExecutionStage>(which % 4); break;
      case 3:
        if (frame.frame.attrs.size > 0)
          frame.frame.attrs.size -= 1 + static_cast<std::int64_t>(which % 2);
        break;
      case 4: frame.pointers[i] = nullptr; break;
      case 5: frame.buffers[i].struct_size = which; break;
      case 6: frame.buffers[i].rank = -1 - static_cast<std::int64_t>(which); break;
      case 7: frame.buffers[i].dims = nullptr; break;
      case 8: {
        if (i < frame.operand_types.size()) {
          frame.operand_types[i] = static_cast<XLA_FFI_ArgType>(0);
        } else {
          frame.result_types[i - frame.operand_types.size()] = static_cast<XLA_FFI_RetType>(0);
        }
        break;
      }
      case 9: {
        if (frame.attribute_types.empty()) break;
        constexpr std::array kTypes{XLA_FFI_AttrType_ARRAY, XLA_FFI_AttrType_DICTIONARY,
                                    XLA_FFI_AttrType_STRING};
        frame.attribute_types[which % frame.attribute_types.size()] = kTypes[which % 3];
        break;
      }
      default: break;
    }
  }
};

// Changes one property of a call.
void Change(Call& call, Bytes& bytes, Spoilt& spoilt, std::vector<std::size_t>& without) {
  const std::size_t what = bytes.Below(16);
  const std::size_t i = bytes.Below(call.arrays());
  const std::size_t a = bytes.Below(call.attributes.size());
  const bool has_array = call.arrays() > 0, has_attribute = !call.attributes.empty();
  if (what < 7 && !has_array) return;
  if (what >= 7 && what < 11 && !has_attribute) return;
  switch (what) {
    case 0: {
      auto& dims = call.array(i).dims;
      if (!dims.empty()) dims[bytes.Below(dims.size())] = bytes.Number();
      break;
    }
    case 1: {
      auto& dims = call.array(i).dims;
      dims.insert(dims.begin() + static_cast<std::ptrdiff_t>(bytes.Below(dims.size() + 1)),
                  bytes.Number());
      break;
    }
    case 2: {
      auto& dims = call.array(i).dims;
      if (!dims.empty())
        dims.erase(dims.begin() + static_cast<std::ptrdiff_t>(bytes.Below(dims.size())));
      break;
    }
    case 3: call.array(i).dtype = static_cast<XLA_FFI_DataType>(bytes.Below(64)); break;
    case 4: without.push_back(i); break;
    case 5: {  // an absent operand
      constexpr std::array kAbsent{XLA_FFI_DataType_F32, XLA_FFI_DataType_F64};
      call.array(i).dims = {0};
      call.array(i).dtype = kAbsent[bytes.Below(2)];
      break;
    }
    case 6: {
      const Array& other = call.array(bytes.Below(call.arrays()));
      call.array(i).dims = other.dims, call.array(i).dtype = other.dtype;
      break;
    }
    case 7:
      call.attributes[a].bits = call.attributes[a].dtype == XLA_FFI_DataType_PRED
                                    ? static_cast<std::int64_t>(bytes.Below(2))
                                    : bytes.Number();
      break;
    case 8: {
      constexpr std::array kTypes{XLA_FFI_DataType_F32, XLA_FFI_DataType_F64, XLA_FFI_DataType_S32,
                                  XLA_FFI_DataType_S64};
      call.attributes[a].dtype = kTypes[bytes.Below(4)];
      break;
    }
    case 9: call.attributes.erase(call.attributes.begin() + static_cast<std::ptrdiff_t>(a)); break;
    case 10: call.attributes[a].name += 'x'; break;
    case 11:
      if (!call.operands.empty()) call.operands.push_back(call.operands[i % call.operands.size()]);
      break;
    case 12:
      if (!call.operands.empty()) call.operands.pop_back();
      break;
    case 13:
      if (!call.results.empty()) call.results.push_back(call.results[i % call.results.size()]);
      break;
    case 14:
      if (!call.results.empty()) call.results.pop_back();
      break;
    case 15: spoilt = {static_cast<int>(bytes.Below(10)), i, bytes.Number()}; break;
    default: break;
  }
}

int Run(Bytes bytes) {
  static const auto handlers = HandlersOf<CpuContext>(DriverOps());
  constexpr std::array kDtypes{XLA_FFI_DataType_F32, XLA_FFI_DataType_BF16, XLA_FFI_DataType_F64,
                               XLA_FFI_DataType_F16};
  const auto& handler = handlers[bytes.Below(handlers.size())];
  const XLA_FFI_DataType dtype = kDtypes[bytes.Below(4)];
  Shape shape{};
  for (auto* const dims : {&shape.groups, &shape.rows, &shape.inner}) {
    for (std::size_t rank = bytes.Below(3); rank > 0; --rank) dims->push_back(bytes.Size());
  }
  shape.features = bytes.Size();
  const Random random(bytes.Below(256) * 256 + bytes.Below(256));
  const Helpers helpers = bytes.Below(8) == 0 ? Helpers::kRefuse : Helpers::kNone;
  Call call = MakeCall(handler.name, dtype, shape, random);
  Spoilt spoilt;
  std::vector<std::size_t> nulls;
  std::vector<bool> scratch;
  for (const Array& result : call.results) scratch.push_back(result.scratch);
  while (bytes.any()) Change(call, bytes, spoilt, nulls);
  for (std::size_t i = 0; i < std::min(scratch.size(), call.results.size()); ++i) {
    call.results[i].scratch = scratch[i] || call.results[i].scratch;
  }
  std::vector<bool> without(call.arrays());
  for (const std::size_t i : nulls) {
    if (i < without.size()) without[i] = true;
  }

  Pool pool(helpers, 4);
  const auto run = [&](Call& with_memory) {
    Frame frame(with_memory);
    spoilt(frame);
    return frame.Run(handler.call, pool);
  };
  Call again = call;
  const Memory memory(call, without, random, 0), other_memory(again, without, random, 0xff);
  const auto error = run(call);
  if (error && !error->message.starts_with(handler.name)) {
    std::fprintf(stderr, "does not name its op: %s\n", error->message.c_str());
    std::abort();
  }
  if (LeakedErrors() != 0) std::abort();
  if (error) return 0;
  if (run(again) || CompareResults(call, again, "elsewhere") != 0) {
    std::fflush(stdout);
    std::abort();
  }
  return 0;
}

}  // namespace
}  // namespace gradops::native

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return gradops::native::Run(gradops::native::Bytes(data, size));
}
