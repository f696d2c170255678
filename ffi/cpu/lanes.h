// Numbers side by side, in one or more registers, and loops over them. Of each lane the result is
// the same in every instruction set, where products and sums are not fused.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/dtype.h"
#include "cpu/registers.h"
#include "cpu/stream.h"

namespace gradops {

// 64 bytes of the accumulation type.
template <typename A>
inline constexpr int kLanes = 64 / int{sizeof(A)};

// kCount numbers.
template <typename A, int kCount = kLanes<A>>
struct Lanes {
  using Register = lanes::Vector<A>;
  static constexpr int kRegisters = kCount / lanes::kWidth<A>;
  Register registers[kRegisters];

  Lanes() = default;
  // Register by register: GCC copies whole structures, these or formulas' of them, through memory,
  // 16 bytes at a time, for which loads of 32 then wait (GELU: 2.2 instead of 0.7 ns an element).
  Lanes(const Lanes& other) { *this = other; }
  Lanes& operator=(const Lanes& other) {
    lanes::ForEachIndex<kRegisters>([&](auto... i) { ((registers[i] = other.registers[i]), ...); });
    return *this;
  }
  // Not explicit, so that numbers mix with lanes.
  Lanes(A value) {
    lanes::ForEachIndex<kRegisters>([&](auto... i) { ((registers[i] = value - Register{}), ...); });
  }

  // Registers fn(0), fn(1), ...
  template <typename Fn>
  static Lanes Map(const Fn& fn) {
    return lanes::ForEachIndex<kRegisters>([&fn](auto... i) {
      Lanes result;
      ((result.registers[i] = fn(i)), ...);
      return result;
    });
  }
  // The same bits.
  template <typename B>
  Lanes<B, kCount> As() const {
    using To = lanes::Vector<B>;
    return Lanes<B, kCount>::Map([this](int i) { return std::bit_cast<To>(registers[i]); });
  }

  friend Lanes operator+(const Lanes& a, const Lanes& b) {
    return Map([&](int i) { return a.registers[i] + b.registers[i]; });
  }
  friend Lanes operator-(const Lanes& a, const Lanes& b) {
    return Map([&](int i) { return a.registers[i] - b.registers[i]; });
  }
  friend Lanes operator*(const Lanes& a, const Lanes& b) {
    return Map([&](int i) { return a.registers[i] * b.registers[i]; });
  }
  friend Lanes operator/(const Lanes& a, const Lanes& b) {
    return Map([&](int i) { return a.registers[i] / b.registers[i]; });
  }
  friend Lanes operator&(const Lanes& a, const Lanes& b) {
    return Map([&](int i) { return a.registers[i] & b.registers[i]; });
  }
  friend Lanes operator<<(const Lanes& a, int bits) {
    return Map([&](int i) { return a.registers[i] << bits; });
  }
  Lanes& operator+=(const Lanes& other) { return *this = *this + other; }
  // a > b ? yes : no; `no` where one is NaN.
  friend Lanes IfGreater(const Lanes& a, const Lanes& b, const Lanes& yes, const Lanes& no) {
    return Map([&](int i) {
      return a.registers[i] > b.registers[i] ? yes.registers[i] : no.registers[i];
    });
  }
  friend Lanes Sqrt(const Lanes& a) {
    return Map([&](int i) { return lanes::Sqrt(a.registers[i]); });
  }
  // By a's sign, of zeros and NaN, too.
  friend Lanes IfNegative(const Lanes& a, const Lanes& yes, const Lanes& no) {
    using Signed = lanes::Vector<std::conditional_t<sizeof(A) == 8, std::int64_t, std::int32_t>>;
    return Map([&](int i) {
      return std::bit_cast<Signed>(a.registers[i]) < 0 ? yes.registers[i] : no.registers[i];
    });
  }
  // Half by half.
  A Sum() const {
    if constexpr (kRegisters == 1) {
      return lanes::Sum(registers[0]);
    } else {
      using Half = Lanes<A, kCount / 2>;
      return Half::Map([this](int i) { return registers[i] + registers[i + Half::kRegisters]; })
          .Sum();
    }
  }
  // a < b ? a : b, and a > b ? a : b.
  friend Lanes Min(const Lanes& a, const Lanes& b) {
    return Map([&](int i) { return lanes::Min(a.registers[i], b.registers[i]); });
  }
  friend Lanes Max(const Lanes& a, const Lanes& b) {
    return Map([&](int i) { return lanes::Max(a.registers[i], b.registers[i]); });
  }
};

// Of one number.
inline float IfGreater(float a, float b, float yes, float no) {
  return a > b ? yes : no;
}
inline double IfGreater(double a, double b, double yes, double no) {
  return a > b ? yes : no;
}
inline float Max(float a, float b) {
  return a > b ? a : b;
}
inline double Max(double a, double b) {
  return a > b ? a : b;
}

// kCount elements, widened.
template <int kCount, typename T>
Lanes<Accum<T>, kCount> LoadLanes(const T* from) {
  using A = Accum<T>;
  if constexpr (requires { lanes::Widen(from); }) {
    return Lanes<A, kCount>::Map(
        [from](int i) { return lanes::Widen(from + i * lanes::kWidth<A>); });
  } else {
    A wide[kCount];
    for (int lane = 0; lane < kCount; ++lane) wide[lane] = static_cast<A>(from[lane]);
    return LoadLanes<kCount>(wide);
  }
}

// How many of kCount elements one instruction stores.
template <typename T, int kCount>
inline constexpr int kTogether = lanes::kWidth<Accum<T>> * [] {
  constexpr bool kHasTwo = requires(T* to, lanes::Vector<Accum<T>> r) { lanes::Narrow(to, r, r); };
  return kHasTwo && Lanes<Accum<T>, kCount>::kRegisters % 2 == 0 ? 2 : 1;
}();

// Rounds them to T.
template <typename T, int kCount>
void StoreLanes(T* to, const Lanes<Accum<T>, kCount>& values) {
  using A = Accum<T>;
  constexpr int kRegisters = Lanes<A, kCount>::kRegisters;
  const auto& from = values.registers;
  if constexpr (kTogether<T, kCount> > lanes::kWidth<A>) {
    lanes::ForEachIndex<kRegisters / 2>([&](auto... i) {
      (lanes::Narrow(to + i * kTogether<T, kCount>, from[2 * i], from[2 * i + 1]), ...);
    });
  } else if constexpr (requires { lanes::Narrow(to, from[0]); }) {
    lanes::ForEachIndex<kRegisters>(
        [&](auto... i) { (lanes::Narrow(to + i * lanes::kWidth<A>, from[i]), ...); });
  } else {
    A wide[kCount];
    StoreLanes(wide, values);
    for (int lane = 0; lane < kCount; ++lane) to[lane] = static_cast<T>(wide[lane]);
  }
}

// The same past the caches; `to` is a multiple of the bytes that are stored.
template <typename T, int kCount>
void StreamLanes(T* to, const Lanes<Accum<T>, kCount>& values) {
  constexpr int kStep = kTogether<T, kCount>;
  T rounded[kCount];
  StoreLanes(rounded, values);
  for (int i = 0; i < kCount; i += kStep) StreamBytes<kStep* int{sizeof(T)}>(to + i, rounded + i);
}

// Where a loop over elements is: at kCount of them from i on.
template <int kCount>
struct AtLanes {
  std::int64_t i;
  template <typename T>
  auto operator()(const T* elements) const {
    return LoadLanes<kCount>(elements + i);
  }
  template <typename T>
  void Store(T* elements, const Lanes<Accum<T>, kCount>& values) const {
    StoreLanes(elements + i, values);
  }
  template <typename T>
  void Stream(T* elements, const Lanes<Accum<T>, kCount>& values) const {
    StreamLanes(elements + i, values);
  }
  // Asks for the cache lines that elements of another array lie in, or those `ahead` of them.
  // Nothing need be there.
  template <typename T>
  void PrefetchToL1(const T* elements, std::int64_t ahead = 0) const {
    ForLines<T>([=, this](int k) {
      __builtin_prefetch(Address(elements, ahead + k), /*rw=*/0, /*locality=*/3);
    });
  }
  // What is read so much later that it would push out of L1 what is read before.
  template <typename T>
  void PrefetchToL2(const T* elements, std::int64_t ahead = 0) const {
    ForLines<T>([=, this](int k) {
      __builtin_prefetch(Address(elements, ahead + k), /*rw=*/0, /*locality=*/2);
    });
  }
  template <typename T>
  void PrefetchToStore(const T* elements, std::int64_t ahead = 0) const {
    ForLines<T>([=, this](int k) { __builtin_prefetch(Address(elements, ahead + k), /*rw=*/1); });
  }

 private:
  // It may lie beyond the array, where no pointer may.
  template <typename T>
  const void* Address(const T* elements, std::int64_t ahead) const {
    const std::int64_t offset = (i + ahead) * std::int64_t{sizeof(T)};
    return reinterpret_cast<const void*>(reinterpret_cast<std::intptr_t>(elements) + offset);
  }
  // fn(k) for the turn's elements i + k of which each is in another line, but for a line in which a
  // turn before was; if the array, or the first turn, starts with one.
  template <typename T, typename Fn>
  void ForLines(const Fn& fn) const {
    constexpr int kLine = 64 / int{sizeof(T)};
    if constexpr (kCount >= kLine) {
      for (int k = 0; k < kCount; k += kLine) fn(k);
    } else {
      if (i / kCount % (kLine / kCount) == 0) fn(0);
    }
  }
};
// The same at the last few elements, of which there are `count`: what other lanes have is 0, and is
// not stored. Results are those of AtLanes, bit by bit.
template <int kCount>
struct AtLast {
  std::int64_t i, count;
  template <typename T>
  auto operator()(const T* elements) const {
    T some[kCount] = {};
    std::copy_n(elements + i, count, some);
    return LoadLanes<kCount>(some);
  }
  template <typename T>
  void Store(T* elements, const Lanes<Accum<T>, kCount>& values) const {
    T some[kCount];
    StoreLanes(some, values);
    std::copy_n(some, count, elements + i);
  }
  template <typename T>
  void Stream(T* elements, const Lanes<Accum<T>, kCount>& values) const {
    Store(elements, values);
  }
  void PrefetchToL1(const void*, std::int64_t = 0) const {}
  void PrefetchToL2(const void*, std::int64_t = 0) const {}
  void PrefetchToStore(const void*, std::int64_t = 0) const {}
};

struct AtElement {
  std::int64_t i;
  template <typename T>
  auto operator()(const T* elements) const {
    return static_cast<Accum<T>>(elements[i]);
  }
  template <typename T>
  void Store(T* elements, Accum<T> value) const {
    elements[i] = static_cast<T>(value);
  }
  template <typename T>
  void Stream(T* elements, Accum<T> value) const {
    elements[i] = static_cast<T>(value);
  }
  void PrefetchToL1(const void*, std::int64_t = 0) const {}
  void PrefetchToL2(const void*, std::int64_t = 0) const {}
  void PrefetchToStore(const void*, std::int64_t = 0) const {}
};

// fn(at) for elements i to n - 1, kCount at a time, and the last ones one by one, which takes less
// time than AtLast.
template <int kCount, typename Fn>
void ForLanes(std::int64_t n, const Fn& fn, std::int64_t i = 0) {
  for (; i + kCount <= n; i += kCount) fn(AtLanes<kCount>{i});
  for (; i < n; ++i) fn(AtElement{i});
}

// The same of what is stored as T: twice kCount at a time, where two registers are rounded at once
// that go to one line. ns an element of bfloat16 [8, 2048] in the caches of a Zen 5 with AVX-512,
// without and with: layer norm 0.180, 0.164, backward 0.256, 0.219, RMS norm 0.113, 0.096 and
// 0.192, 0.162.
template <int kCount, typename T, typename Fn>
void ForStores(std::int64_t n, const Fn& fn) {
  constexpr int kTwice = 2 * kCount;
  std::int64_t i = 0;
  if constexpr (kTogether<T, kTwice> == kTwice) {
    for (; i + kTwice <= n; i += kTwice) fn(AtLanes<kTwice>{i});
  }
  ForLanes<kCount>(n, fn, i);
}

// to[i] = fn(at) for all of n elements, past the caches if `streamed`. No loop's function refers to
// fn, or streamed results take longer: of a row in the caches, float32 [8, 1024], layer norm 0.160
// ns an element with references, 0.135 with copies, backward 0.318, 0.205.
template <int kCount, typename T, typename Fn>
void StoreForLanes(T* to, std::int64_t n, bool streamed, const Fn& fn) {
  if (!streamed || reinterpret_cast<std::uintptr_t>(to) % sizeof(T) != 0) {
    ForStores<kCount, T>(n, [=](auto at) { at.Store(to, fn(at)); });
    return;
  }
  const std::int64_t head = std::min(n, BytesToLine(to) / std::int64_t{sizeof(T)});
  if (sizeof(T) == 2 && (head > 0 || n * std::int64_t{sizeof(T)} % 64 != 0)) {
    // By way of a block, as one by one these take long (batch norm of 300 channels: 16 to 11 ms).
    constexpr std::int64_t kBlock = 256;
    alignas(64) T block[kBlock];
    for (std::int64_t start = 0; start < n; start += kBlock) {
      const std::int64_t count = std::min(kBlock, n - start);
      ForStores<kCount, T>(count, [=, &block](auto at) {
        const decltype(at) there{start + at.i};
        at.Store(block, fn(there));
      });
      StreamCopy(to + start, block, count * std::int64_t{sizeof(T)});
    }
    return;
  }
  const auto one = [=](AtElement at) { at.Store(to, fn(at)); };
  for (std::int64_t i = 0; i < head; ++i) one({i});
  ForStores<kCount, T>(n - head, [=](auto at) {
    const decltype(at) there{head + at.i};
    there.Stream(to, fn(there));
  });
}

// fn(at) for all of n elements, the last ones as the others.
template <int kCount, typename Fn>
void ForWholeLanes(std::int64_t n, const Fn& fn) {
  std::int64_t i = 0;
  for (; i + kCount <= n; i += kCount) fn(AtLanes<kCount>{i});
  if (i < n) fn(AtLast<kCount>{i, n - i});
}

// The sums over i < n of terms(at), which returns an array of kSums of them. Each lane adds up a
// few terms at a time. Many in a row would be biased: the squares of numbers on a grid, as
// differences of large numbers are, all round in the same direction.
template <typename A, int kSums, typename Terms>
std::array<A, kSums> LaneSums(std::int64_t n, const Terms& terms) {
  constexpr std::int64_t kAtATime = 16 * kLanes<A>;
  using Sums = std::array<Lanes<A>, kSums>;
  const auto zeros = [] {
    return lanes::ForEachIndex<kSums>([](auto... s) { return Sums{((void)s, Lanes<A>(0))...}; });
  };
  const auto add = [](Sums& to, const Sums& terms) {
    lanes::ForEachIndex<kSums>([&](auto... s) { ((to[s] += terms[s]), ...); });
  };
  Sums sums = zeros();
  std::int64_t i = 0;
  for (std::int64_t end = 0; i + kLanes<A> <= n;) {
    Sums few = zeros();
    for (end += kAtATime; i + kLanes<A> <= std::min(n, end); i += kLanes<A>) {
      add(few, terms(AtLanes<kLanes<A>>{i}));
    }
    add(sums, few);
  }
  if (i < n) {
    A last[kSums][kLanes<A>];
    for (int lane = 0; i + lane < n; ++lane) {
      const auto term = terms(AtElement{i + lane});
      for (int s = 0; s < kSums; ++s) last[s][lane] = term[s];
    }
    const auto add_last = [&](Lanes<A>& sum, const A* last) {
      A values[kLanes<A>];
      StoreLanes(values, sum);
      for (int lane = 0; i + lane < n; ++lane) values[lane] += last[lane];
      sum = LoadLanes<kLanes<A>>(values);
    };
    lanes::ForEachIndex<kSums>([&](auto... s) { (add_last(sums[s], last[s]), ...); });
  }
  return lanes::ForEachIndex<kSums>([&](auto... s) { return std::array{sums[s].Sum()...}; });
}

}  // namespace gradops
