// Makes good calls of each op.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "frame.h"
#include "ops/handlers.h"
#include "testing/ops.h"
#include "xla/ffi/api/c_api.h"

namespace gradops::native {

// All ops that the driver calls: the library's, and those of the testing modules.
using DriverOps = decltype(Joined(AllOps(), TestingOps()));

// Random numbers that are equal in each run.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t operator()() {  // splitmix64
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  std::uint64_t Below(std::uint64_t n) { return (*this)() % n; }

 private:
  std::uint64_t state_;
};

// x is [groups..., rows..., features, inner...].
struct Shape {
  std::vector<std::int64_t> groups, rows;
  std::int64_t features;
  std::vector<std::int64_t> inner;  // for ops with such axes
};

// A good call with these sizes. `random` chooses the options, the parameters' dtypes and which
// operands are present. Arrays have no data.
Call MakeCall(std::string_view op, XLA_FFI_DataType dtype, const Shape& shape, Random random);

// Writes finite numbers to the operands. Only bias_gelu_fwd's first operand may also get NaNs.
void FillOperands(const Call& call, Random random);

// Whether the array may be smaller or larger, if there is enough memory.
bool HasFreeShape(std::string_view op, std::string_view name);
// Whether the array may have any of the four float dtypes.
bool HasFreeDtype(std::string_view op, std::string_view name);
// Whether the attribute must not be negative.
bool IsNonNegative(std::string_view op, std::string_view attribute);
// Whether the first results may take over the first operands' memory.
bool MayBeInPlace(std::string_view op);

}  // namespace gradops::native
