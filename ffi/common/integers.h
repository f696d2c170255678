// Quotients of whole numbers.
#pragma once

#include <cstdint>

namespace gradops {

constexpr std::int64_t CeilDiv(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}
// To a multiple of b.
constexpr std::int64_t RoundUp(std::int64_t a, std::int64_t b) {
  return CeilDiv(a, b) * b;
}

}  // namespace gradops
