// Integer division that rounds up.
#pragma once

#include <cstdint>

namespace gradops {

constexpr std::int64_t CeilDiv(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}
// The smallest multiple of b that is not less than a.
constexpr std::int64_t RoundUp(std::int64_t a, std::int64_t b) {
  return CeilDiv(a, b) * b;
}

}  // namespace gradops
