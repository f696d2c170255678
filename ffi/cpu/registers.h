// One register of numbers, in the instruction set that a file is compiled for. It uses the vector
// extensions that GCC and Clang share. So loops do not depend on what a compiler vectorises by
// itself: GCC 13 took 16 times as long as GCC 12 for layer norm's loops.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__SSE4_1__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "common/dtype.h"

namespace gradops {

#if defined(__AVX512F__)
inline constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kRegisterBytes = 32;
#else
inline constexpr int kRegisterBytes = 16;
#endif

// Where lanes take four registers, GCC 12 does not inline all functions of lanes. It passes them
// through memory. That took four times as long (cross-entropy, silu).
#if defined(__AVX2__)
#define GRADOPS_INLINE_LANES
#else
#define GRADOPS_INLINE_LANES __attribute__((always_inline))
#endif

namespace lanes {

template <typename A>
inline constexpr int kWidth = kRegisterBytes / int{sizeof(A)};

// A vector of kBytes bytes, with elements of type A.
template <typename A, int kBytes>
struct VectorOf {
  typedef A type __attribute__((vector_size(kBytes)));
};
template <typename A, int kBytes = kRegisterBytes>
using Vector = typename VectorOf<A, kBytes>::type;
// A vector of T with one element for each A of a register.
template <typename T, typename A>
using Packed = Vector<T, kWidth<A>* int{sizeof(T)}>;

// Calls fn(0, ..., kCount - 1), with integral constants. This writes a loop out, because GCC keeps
// arrays that loops index in memory: GCC 12 took four times as long with loops.
template <int kCount, typename Fn>
GRADOPS_INLINE_LANES constexpr auto ForEachIndex(const Fn& fn) {
  return [&]<int... i>(std::integer_sequence<int, i...>) GRADOPS_INLINE_LANES {
    return fn(std::integral_constant<int, i>{}...);
  }(std::make_integer_sequence<int, kCount>{});
}

template <typename V>
V LoadVector(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

#if defined(__AVX512F__)
inline constexpr __mmask16 kAll = 0xffff;  // GCC 12 warns of the forms without a mask
#endif

// Loads a register of elements, widened.
inline Vector<float> Widen(const float* from) {
  return LoadVector<Vector<float>>(from);
}
inline Vector<double> Widen(const double* from) {
  return LoadVector<Vector<double>>(from);
}
inline Vector<float> Widen(const BFloat16* from) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  // Moves each number to the upper half of a float: one instruction after the load.
  const auto place = [](int i) { return 0x8080 | 2 * i << 16 | (2 * i + 1) << 24; };
  const auto places = _mm256_setr_epi32(place(0), place(1), place(2), place(3), place(4), place(5),
                                        place(6), place(7));
  const auto both = _mm256_broadcastsi128_si256(LoadVector<__m128i>(from));
  return Vector<float>(_mm256_shuffle_epi8(both, places));
#else
#if defined(__AVX512F__)
  const auto bits = _mm512_maskz_cvtepu16_epi32(kAll, LoadVector<__m256i>(from));
#elif defined(__SSE4_1__)
  const auto bits = _mm_cvtepu16_epi32(_mm_loadu_si64(from));
#else
  const auto packed = LoadVector<Packed<std::uint16_t, float>>(from);
  const auto bits = __builtin_convertvector(packed, Vector<std::uint32_t>);
#endif
  return std::bit_cast<Vector<float>>(std::bit_cast<Vector<std::uint32_t>>(bits) << 16);
#endif
}
// Loads a register of doubles. GCC 12 by itself converts only one or two numbers at a time.
inline Vector<double> WidenToDouble(const double* from) {
  return Widen(from);
}
inline Vector<double> WidenToDouble(const float* from) {
#if defined(__AVX512F__)
  return Vector<double>(_mm512_maskz_cvtps_pd(0xff, LoadVector<__m256>(from)));
#elif defined(__AVX2__)
  return Vector<double>(_mm256_cvtps_pd(LoadVector<__m128>(from)));
#else
  return __builtin_convertvector((LoadVector<Packed<float, double>>(from)), Vector<double>);
#endif
}
// Without these instructions, loops over scalars do the work. Compilers do vectorise those loops.
#if defined(__AVX2__) || defined(__ARM_FP16_FORMAT_IEEE)
inline Vector<float> Widen(const Half* from) {
#if defined(__AVX512F__)
  return std::bit_cast<Vector<float>>(_mm512_maskz_cvtph_ps(kAll, LoadVector<__m256i>(from)));
#elif defined(__AVX2__)
  return std::bit_cast<Vector<float>>(_mm256_cvtph_ps(LoadVector<__m128i>(from)));
#else
  return __builtin_convertvector((LoadVector<Packed<__fp16, float>>(from)), Vector<float>);
#endif
}
#endif

// Rounds the numbers of a register and stores them.
inline void Narrow(float* to, Vector<float> r) {
  std::memcpy(to, &r, sizeof(r));
}
inline void Narrow(double* to, Vector<double> r) {
  std::memcpy(to, &r, sizeof(r));
}
#if !defined(__AVX512F__)
// Rounds like BFloat16's constructor. The results are in the lower halves. If registers go in pairs
// (below), this is for a register that is stored alone.
inline Vector<std::uint32_t> RoundedToBFloat16(Vector<float> r) {
  using Bits = Vector<std::uint32_t>;
  const auto u = std::bit_cast<Bits>(r);
  const auto rounded = u + 0x7fffu + ((u >> 16) & 1u);
  const auto nan = std::bit_cast<Bits>(r != r) & 0x7fc00000u;
  return (rounded | nan) >> 16;
}
#endif
inline void Narrow(BFloat16* to, Vector<float> r) {
#if defined(__AVX512F__)  // with masks: two thirds of the instructions
  const auto one = [](int value) { return _mm512_set1_epi32(value); };
  const auto u = std::bit_cast<__m512i>(r);
  const auto half = _mm512_maskz_add_epi32(kAll, u, one(0x7fff));
  const auto rounded =
      _mm512_mask_add_epi32(half, _mm512_test_epi32_mask(u, one(0x10000)), half, one(1));
  const auto is_nan = _mm512_cmp_ps_mask(r, r, _CMP_UNORD_Q);
  const auto whole = _mm512_mask_or_epi32(rounded, is_nan, rounded, one(0x7fc00000));
  const auto packed = _mm512_maskz_cvtepi32_epi16(kAll, _mm512_maskz_srli_epi32(kAll, whole, 16));
#else
  const auto packed = __builtin_convertvector(RoundedToBFloat16(r), Packed<std::uint16_t, float>);
#endif
  std::memcpy(to, &packed, sizeof(packed));
}
#if defined(__SSE4_1__)
// Rounds and stores two registers. The upper and lower halves of their numbers are taken apart: one
// instruction then handles twice the numbers, of 16 bits each. The numbers must be results of
// arithmetic, because a NaN is then quiet. It stays a NaN if the upper half does not overflow.
inline void Narrow(BFloat16* to, Vector<float> first, Vector<float> second) {
  using Bits = Vector<std::uint32_t>;
  const auto a = std::bit_cast<Bits>(first), b = std::bit_cast<Bits>(second);
#if defined(__AVX512F__)
  constexpr __mmask32 kEvery = ~__mmask32{0};
  const auto every = [](int value) { return _mm512_set1_epi16(static_cast<short>(value)); };
  const auto halves = ForEachIndex<32>(
      [](auto... i) { return Vector<std::uint16_t>{static_cast<std::uint16_t>(2 * i)...}; });
  const auto lower =
      _mm512_maskz_permutex2var_epi16(kEvery, __m512i(a), __m512i(halves), __m512i(b));
  const auto upper =
      _mm512_maskz_permutex2var_epi16(kEvery, __m512i(a), __m512i(halves + 1), __m512i(b));
  const auto half =
      _mm512_maskz_add_epi16(kEvery, _mm512_and_si512(upper, every(1)), every(0x7ffe));
  const auto carry =
      _mm512_maskz_srli_epi16(kEvery, _mm512_maskz_avg_epu16(kEvery, lower, half), 15);
  const auto packed =
      _mm512_maskz_max_epu16(kEvery, _mm512_maskz_adds_epi16(kEvery, upper, carry), upper);
#elif defined(__AVX2__)
  const auto every = [](int value) { return _mm256_set1_epi16(static_cast<short>(value)); };
  const auto upper = _mm256_blend_epi16(__m256i(a >> 16), __m256i(b), 0b10101010);
  const auto lower = _mm256_blend_epi16(__m256i(a), __m256i(b << 16), 0b10101010);
  // The average is (lower + 0x7fff + the upper half's last bit) / 2, so its first bit is the carry.
  const auto half = _mm256_add_epi16(_mm256_and_si256(upper, every(1)), every(0x7ffe));
  const auto carry = _mm256_srli_epi16(_mm256_avg_epu16(lower, half), 15);
  const auto rounded = _mm256_max_epu16(_mm256_adds_epi16(upper, carry), upper);
  const auto order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  const auto packed = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(rounded, order), 0b11011000);
#else
  const auto every = [](int value) { return _mm_set1_epi16(static_cast<short>(value)); };
  const auto upper = _mm_blend_epi16(__m128i(a >> 16), __m128i(b), 0b10101010);
  const auto lower = _mm_blend_epi16(__m128i(a), __m128i(b << 16), 0b10101010);
  const auto half = _mm_add_epi16(_mm_and_si128(upper, every(1)), every(0x7ffe));
  const auto carry = _mm_srli_epi16(_mm_avg_epu16(lower, half), 15);
  const auto rounded = _mm_max_epu16(_mm_adds_epi16(upper, carry), upper);
  const auto packed = _mm_shuffle_epi8(
      rounded, _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
#endif
  std::memcpy(to, &packed, sizeof(packed));
}
#endif
#if defined(__AVX2__) || defined(__ARM_FP16_FORMAT_IEEE)
inline void Narrow(Half* to, Vector<float> r) {
#if defined(__AVX512F__)
  const auto packed =
      _mm512_maskz_cvtps_ph(kAll, std::bit_cast<__m512>(r), _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
  const auto packed = _mm256_cvtps_ph(std::bit_cast<__m256>(r), _MM_FROUND_TO_NEAREST_INT);
#else
  const auto packed = __builtin_convertvector(r, Packed<__fp16, float>);
#endif
  std::memcpy(to, &packed, sizeof(packed));
}
#endif

// The sum of all numbers. Halves are added until one number is left.
template <typename V, int kCount = int{sizeof(V) / sizeof(std::declval<V>()[0])}>
auto Sum(V r) {
  constexpr int kHalf = kCount / 2;
  const V sum = r + [&]<int... i>(std::integer_sequence<int, i...>) -> V {
    return __builtin_shufflevector(r, r, (i ^ kHalf)...);
  }(std::make_integer_sequence<int, int{sizeof(V) / sizeof(r[0])}>{});
  if constexpr (kHalf == 1) {
    return sum[0];
  } else {
    return Sum<V, kHalf>(sum);
  }
}

// Min is a < b ? a : b, and Max is a > b ? a : b. So the result is b where a or b is NaN. Compilers
// make several instructions of such an expression.
template <typename V>
V Min(V a, V b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<V, Vector<float>>) return V(_mm512_maskz_min_ps(kAll, a, b));
  if constexpr (std::is_same_v<V, Vector<double>>) return V(_mm512_maskz_min_pd(0xff, a, b));
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<V, Vector<float>>) return V(_mm256_min_ps(a, b));
  if constexpr (std::is_same_v<V, Vector<double>>) return V(_mm256_min_pd(a, b));
#else
  return a < b ? a : b;
#endif
}
template <typename V>
V Max(V a, V b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<V, Vector<float>>) return V(_mm512_maskz_max_ps(kAll, a, b));
  if constexpr (std::is_same_v<V, Vector<double>>) return V(_mm512_maskz_max_pd(0xff, a, b));
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<V, Vector<float>>) return V(_mm256_max_ps(a, b));
  if constexpr (std::is_same_v<V, Vector<double>>) return V(_mm256_max_pd(a, b));
#else
  return a > b ? a : b;
#endif
}
// The correctly rounded root. Compilers call a function for std::sqrt if it may have to set errno.
template <typename V>
V Sqrt(V r) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<V, Vector<float>>) return V(_mm512_maskz_sqrt_ps(kAll, r));
  if constexpr (std::is_same_v<V, Vector<double>>) return V(_mm512_maskz_sqrt_pd(0xff, r));
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<V, Vector<float>>) return V(_mm256_sqrt_ps(r));
  if constexpr (std::is_same_v<V, Vector<double>>) return V(_mm256_sqrt_pd(r));
#elif defined(__SSE4_1__)
  if constexpr (std::is_same_v<V, Vector<float>>) return V(_mm_sqrt_ps(r));
  if constexpr (std::is_same_v<V, Vector<double>>) return V(_mm_sqrt_pd(r));
#elif defined(__aarch64__)
  if constexpr (std::is_same_v<V, Vector<float>>) return V(vsqrtq_f32(r));
  if constexpr (std::is_same_v<V, Vector<double>>) return V(vsqrtq_f64(r));
#else
  return ForEachIndex<int{sizeof(V) / sizeof(r[0])}>(
      [&r](auto... i) { return V{std::sqrt(r[i])...}; });
#endif
}

// A register has parts of 16 bytes. kPart is the number of elements in a part.
template <typename A>
inline constexpr int kPart = 16 / int{sizeof(A)};
template <typename A>
using Part = Vector<A, 16>;

// A register with the parts load(0), load(1), ...
template <typename A, typename Load, int kCount = kWidth<A> / kPart<A>, int kFirst = 0>
Vector<A, 16 * kCount> Concatenated(const Load& load) {
  if constexpr (kCount == 1) {
    return load(kFirst);
  } else {
    const auto low = Concatenated<A, Load, kCount / 2, kFirst>(load);
    const auto high = Concatenated<A, Load, kCount / 2, kFirst + kCount / 2>(load);
    return ForEachIndex<kCount * kPart<A>>([&](auto... i) -> Vector<A, 16 * kCount> {
      return __builtin_shufflevector(low, high, (0 + i)...);
    });
  }
}
// Part kIndex of a register.
template <int kIndex, typename A, typename V>
Part<A> PartOf(V r) {
  return ForEachIndex<kPart<A>>([&](auto... i) -> Part<A> {
    return __builtin_shufflevector(r, r, (kIndex * kPart<A> + i)...);
  });
}

// Number i of each part is number kFrom[i] of a's part and b's part, counted one after the other.
template <typename A, int... kFrom, typename V>
V WithinParts(V a, V b) {
  constexpr int kCount = kWidth<A>;
  constexpr auto from = [](int i) { return std::array{kFrom...}[static_cast<std::size_t>(i)]; };
  return ForEachIndex<kCount>([&](auto... i) -> V {
    return __builtin_shufflevector(a, b,
                                   (i / kPart<A> * kPart<A> + from(i % kPart<A>) % kPart<A> +
                                    from(i % kPart<A>) / kPart<A> * kCount)...);
  });
}

// Transposes part by part: number i of register j becomes number j of register i.
inline void Transpose(Vector<float> (&r)[4]) {
  const auto a = WithinParts<float, 0, 4, 1, 5>(r[0], r[1]),
             b = WithinParts<float, 2, 6, 3, 7>(r[0], r[1]),
             c = WithinParts<float, 0, 4, 1, 5>(r[2], r[3]),
             d = WithinParts<float, 2, 6, 3, 7>(r[2], r[3]);
  r[0] = WithinParts<float, 0, 1, 4, 5>(a, c), r[1] = WithinParts<float, 2, 3, 6, 7>(a, c);
  r[2] = WithinParts<float, 0, 1, 4, 5>(b, d), r[3] = WithinParts<float, 2, 3, 6, 7>(b, d);
}
inline void Transpose(Vector<double> (&r)[2]) {
  const auto a = r[0], b = r[1];
  r[0] = WithinParts<double, 0, 2>(a, b), r[1] = WithinParts<double, 1, 3>(a, b);
}

// a b + c and c - a b. They are rounded once if the processor has fma.
#if (defined(__FMA__) && defined(__AVX2__)) || defined(__ARM_FEATURE_FMA)
#define GRADOPS_FMA 1
#endif
template <typename V>
V MulAdd(V a, V b, V c) {
#if !defined(GRADOPS_FMA)
  return a * b + c;
#elif defined(__AVX512F__)
  if constexpr (std::is_same_v<V, Vector<float>>) return V(_mm512_fmadd_ps(a, b, c));
  if constexpr (std::is_same_v<V, Vector<double>>) return V(_mm512_fmadd_pd(a, b, c));
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<V, Vector<float>>) return V(_mm256_fmadd_ps(a, b, c));
  if constexpr (std::is_same_v<V, Vector<double>>) return V(_mm256_fmadd_pd(a, b, c));
#else
  if constexpr (std::is_same_v<V, Vector<float>>) return V(vfmaq_f32(c, a, b));
  if constexpr (std::is_same_v<V, Vector<double>>) return V(vfmaq_f64(c, a, b));
#endif
}
template <typename V>
V MulSub(V c, V a, V b) {
  return MulAdd(-a, b, c);
}

}  // namespace lanes

}  // namespace gradops
