// Element types, the accumulation dtype, and the dispatch from a runtime dtype to a C++ type.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "xla/ffi/api/ffi.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define GRADOPS_HOST_DEVICE __host__ __device__
#else
#define GRADOPS_HOST_DEVICE [[gnu::always_inline]]
#endif
// For formulas of lanes. A call would pass lanes through memory, and load a polynomial's
// coefficients for each vector.
#define GRADOPS_INLINE [[gnu::always_inline]] inline

namespace gradops {

namespace ffi = ::xla::ffi;

#if defined(__CUDACC__)
using BFloat16 = __nv_bfloat16;
using Half = __half;
#else
// A storage type: arithmetic happens in float. The conversions round to nearest even and keep a NaN
// a NaN. They use masks, not conditions: GCC moves floating-point work into the branches of a
// condition, and then does not vectorise the loop.
struct BFloat16 {
  std::uint16_t bits;
  BFloat16() = default;
  explicit BFloat16(float value) {
    const auto u = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = u + 0x7fffu + ((u >> 16) & 1u);
    const std::uint32_t nan = 0x7fc00000u & (0u - static_cast<std::uint32_t>(value != value));
    bits = static_cast<std::uint16_t>((rounded | nan) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
};

struct Half {
  std::uint16_t bits;
  Half() = default;
  explicit Half(float value) {
    const auto u = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (u >> 16) & 0x8000u;
    const std::uint32_t magnitude = u & 0x7fffffffu;
    // Normal results: rebias the exponent (127 -> 15) and round away the last 13 bits.
    const std::uint32_t normal =
        (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Subnormal results: the last bit of a sum with 0.5 is 2^-24. So the addition rounds.
    const std::uint32_t subnormal =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const auto mask = [](bool condition) { return 0u - static_cast<std::uint32_t>(condition); };
    const std::uint32_t is_subnormal = mask(magnitude < 0x38800000u);
    const std::uint32_t is_infinite = mask(magnitude >= 0x47800000u);  // from 2^16 on
    const std::uint32_t is_nan = mask(magnitude > 0x7f800000u);
    std::uint32_t result = (subnormal & is_subnormal) | (normal & ~is_subnormal);
    result = (result & ~is_infinite) | (0x7c00u & is_infinite) | (0x0200u & is_nan);
    bits = static_cast<std::uint16_t>(sign | result);
  }
  explicit operator float() const {
    const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16;
    const std::uint32_t magnitude = bits & 0x7fffu;
    const std::uint32_t is_subnormal = 0u - static_cast<std::uint32_t>(magnitude < 0x0400u);
    const std::uint32_t is_special = 0u - static_cast<std::uint32_t>(magnitude >= 0x7c00u);
    const auto subnormal = std::bit_cast<std::uint32_t>(
        static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
    const std::uint32_t normal = (magnitude << 13) + 0x38000000u + (is_special & 0x38000000u);
    const std::uint32_t result = (normal & ~is_subnormal) | (subnormal & is_subnormal);
    return std::bit_cast<float>(sign | result);
  }
};
#endif

template <typename T>
inline constexpr ffi::DataType kDtype = ffi::DataType::INVALID;
template <>
inline constexpr ffi::DataType kDtype<float> = ffi::F32;
template <>
inline constexpr ffi::DataType kDtype<double> = ffi::F64;
template <>
inline constexpr ffi::DataType kDtype<Half> = ffi::F16;
template <>
inline constexpr ffi::DataType kDtype<BFloat16> = ffi::BF16;

// The accumulation type of T. Sums, statistics and parameters use Accum<T>. Its counterpart in
// Python is accum_dtype in jax_gradops/_kernel/array_types.py.
template <typename T>
using Accum = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename... Ts>
struct TypeList {};
template <typename... As, typename... Bs>
TypeList<As..., Bs...> Joined(TypeList<As...>, TypeList<Bs...>);  // only for decltype
using FloatTypes = TypeList<float, double, Half, BFloat16>;

inline bool IsFloat(ffi::DataType dtype) {
  return dtype == ffi::F32 || dtype == ffi::F64 || dtype == ffi::F16 || dtype == ffi::BF16;
}

inline ffi::DataType AccumDtype(ffi::DataType dtype) {
  return dtype == ffi::F64 ? ffi::F64 : ffi::F32;
}

// Scratch is declared as integers that are as wide as the accumulation dtype. The reason: scratch
// holds old memory contents, and jax_debug_nans looks for NaN in every float result.
inline ffi::DataType ScratchDtype(ffi::DataType dtype) {
  return AccumDtype(dtype) == ffi::F64 ? ffi::U64 : ffi::U32;
}

inline std::int64_t ByteWidthOf(ffi::DataType dtype) {
  return static_cast<std::int64_t>(ffi::ByteWidth(dtype));
}

inline std::string Name(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::F16: return "float16";
    case ffi::BF16: return "bfloat16";
    case ffi::F32: return "float32";
    case ffi::F64: return "float64";
    case ffi::S32: return "int32";
    case ffi::U32: return "uint32";
    case ffi::U64: return "uint64";
    default: return "dtype number " + std::to_string(static_cast<int>(dtype));
  }
}

// Calls `fn.operator()<T>()` for the T in the list whose dtype is `dtype`.
template <typename... Ts, typename Fn>
ffi::Error DispatchDtype(TypeList<Ts...>, std::string_view op, ffi::DataType dtype, Fn&& fn) {
  ffi::Error result;
  const bool matched =
      ((dtype == kDtype<Ts> && (result = fn.template operator()<Ts>(), true)) || ...);
  if (matched) return result;
  return ffi::Error::InvalidArgument(std::string(op) + ": unsupported " + Name(dtype));
}

}  // namespace gradops
