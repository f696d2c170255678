// Good calls in memory that detects every access outside an array, and every element of a result
// that is not written.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "checks.h"

namespace gradops::native {
namespace {

constexpr std::size_t kPage = 4096;
constexpr unsigned char kCanary = 0xa7;
constexpr std::size_t kCanaryBytes = 256;  // bytes that are checked on both sides of an array

// Memory pages between two pages that cannot be accessed.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes)
      : bytes_((bytes + 3 * kCanaryBytes + kPage - 1) / kPage * kPage) {
    void* const all =
        mmap(nullptr, bytes_ + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    begin_ = static_cast<unsigned char*>(all) + kPage;
    if (all == MAP_FAILED || mprotect(begin_, bytes_, PROT_READ | PROT_WRITE) != 0) std::abort();
  }
  Guarded(const Guarded&) = delete;
  ~Guarded() { munmap(begin_ - kPage, bytes_ + 2 * kPage); }

  unsigned char* begin() const { return begin_; }
  unsigned char* end() const { return begin_ + bytes_; }

 private:
  std::size_t bytes_;
  unsigned char* begin_;
};

enum class Placement {
  kEnd,         // ends at the page that cannot be accessed
  kStart,       // starts after such a page
  kMisaligned,  // starts at an odd multiple of its element size
};
constexpr std::array kPlacements{Placement::kEnd, Placement::kStart, Placement::kMisaligned};

// Places the arrays of each call. All calls use these pages, one after another.
class GuardedMemory {
 public:
  void Place(Call& call, Placement placement, Random random, unsigned char poison) {
    for (std::size_t i = 0; i < call.arrays(); ++i) {
      Array& array = call.array(i);
      const std::size_t bytes = array.bytes();
      if (i >= pages_.size()) pages_.emplace_back();
      if (pages_[i] == nullptr || static_cast<std::size_t>(pages_[i]->end() - pages_[i]->begin()) <
                                      bytes + 3 * kCanaryBytes) {
        pages_[i] = std::make_unique<Guarded>(bytes);
      }
      const Guarded& pages = *pages_[i];
      // Scratch holds doubles.
      const std::size_t odd = array.scratch ? sizeof(double) : array.width();
      unsigned char* const data = placement == Placement::kEnd ? pages.end() - bytes
                                  : placement == Placement::kStart
                                      ? pages.begin()
                                      : pages.begin() + kCanaryBytes + odd;
      array.data = data;
      std::fill(Before(pages, data), data, kCanary);
      std::fill(data + bytes, After(pages, data + bytes), kCanary);
      std::fill_n(data, bytes, poison);
    }
    FillOperands(call, random);
  }

  // The number of arrays next to which something was written.
  int Overrun(const Call& call) const {
    int failures = 0;
    for (std::size_t i = 0; i < call.arrays(); ++i) {
      const Array& array = call.array(i);
      auto* const data = static_cast<unsigned char*>(array.data);
      const auto intact = [](const unsigned char* from, const unsigned char* to) {
        return std::all_of(from, to, [](unsigned char byte) { return byte == kCanary; });
      };
      if (!intact(Before(*pages_[i], data), data)) {
        failures += Fail(call, "wrote before %s", array.name.c_str());
      }
      if (!intact(data + array.bytes(), After(*pages_[i], data + array.bytes()))) {
        failures += Fail(call, "wrote behind %s", array.name.c_str());
      }
    }
    return failures;
  }

 private:
  static unsigned char* Before(const Guarded& pages, unsigned char* data) {
    return data - std::min<std::ptrdiff_t>(kCanaryBytes, data - pages.begin());
  }
  static unsigned char* After(const Guarded& pages, unsigned char* end) {
    return end + std::min<std::ptrdiff_t>(kCanaryBytes, pages.end() - end);
  }

  std::vector<std::unique_ptr<Guarded>> pages_;
};

// Sizes near changes in the kernels. These are vectors of 4 to 16 elements and blocks of 16 lanes.
// Further changes are at 256, 512, 1024 and 2048 columns, 128 rows, and 64 KB per thread.
std::vector<Shape> Shapes(bool large) {
  std::vector<Shape> shapes{
      {{}, {1}, 1, {}},
      {{}, {2}, 3, {1}},
      {{}, {3}, 7, {2}},
      {{}, {5}, 16, {15}},
      {{2}, {3}, 17, {3}},
      {{3, 1}, {2}, 31, {2, 3}},
      {{}, {1}, 33, {17}},
      {{}, {129}, 5, {1}},
      {{2}, {130}, 3, {4}},
      {{}, {2, 3}, 127, {}},
      {{}, {3}, 257, {}},
      {{}, {2}, 1023, {}},
      {{}, {1}, 1025, {2}},
      {{}, {2}, 2049, {}},
      {{2}, {150}, 65, {}},
      {{}, {2}, 2, {1025}},
      {{}, {131}, 300, {}},
      {{}, {}, 9, {}},
      {{}, {4}, 1, {1}},
      {{2}, {1}, 512, {}},
      {{}, {33}, 19, {33}},
      // Rows and groups that share registers: full or not, of several groups, of the largest width.
      {{}, {37}, 64, {}},
      {{}, {35}, 63, {}},
      {{19}, {1}, 6, {}},
      {{7}, {3}, 4, {}},
      {{3}, {16}, 8, {}},
      {{17}, {2}, 2, {2}},
      // Groups of batch norm that a plain loop handles.
      {{3}, {40}, 8, {}},
      {{}, {1301}, 3, {}},
      // Arrays without elements.
      {{}, {0}, 4, {}},
      {{}, {3}, 0, {}},
      {{0}, {2}, 3, {}},
      {{2}, {0}, 5, {3}},
      {{}, {2}, 3, {0}},
      {{2}, {3}, 0, {2}},
  };
  if (large) {
    // Large enough for several parts per group, or many slices.
    shapes.insert(shapes.end(), {{{}, {1030}, 1031, {}},
                                 {{}, {5}, 7, {30011}},
                                 {{2}, {16}, 36, {1009}},
                                 {{}, {70001}, 17, {}},
                                 {{3}, {700}, 131, {}},
                                 {{}, {3}, 700003, {}}});
  }
  return shapes;
}

// Checks a call in other memory. `expected` has its results.
int CheckPlaced(const NamedHandler& handler, const Call& expected, Random random, Pool& pool,
                GuardedMemory& memory) {
  int failures = 0;
  for (const Placement placement : kPlacements) {
    Call call = expected;
    memory.Place(call, placement, random, 0xff);  // a NaN in each dtype
    if (const auto error = Frame(call).Run(handler.call, pool)) {
      failures += Fail(call, "%s", error->message.c_str());
      continue;
    }
    failures += memory.Overrun(call);
    failures += CompareResults(call, expected, "placed elsewhere");
    for (std::size_t i = 0; i < call.operands.size(); ++i) {
      const Array& operand = call.operands[i];
      if (operand.bytes() > 0 &&
          std::memcmp(operand.data, expected.operands[i].data, operand.bytes()) != 0) {
        failures += Fail(call, "wrote to %s", operand.name.c_str());
      }
    }
  }
  return failures;
}

int CheckAgain(const NamedHandler& handler, const Call& expected, Random random, Pool& pool,
               bool in_place) {
  Call call = expected;
  const Heap heap(call, random, 0x00);
  const std::size_t same = !in_place ? 0 : call.op == "scale" ? call.results.size() : 1;
  for (std::size_t i = 0; i < same; ++i) call.results[i].data = call.operands[i].data;
  if (const auto error = Frame(call).Run(handler.call, pool)) {
    return Fail(call, "%s", error->message.c_str());
  }
  return CompareResults(call, expected, in_place ? "in place" : "on three threads");
}

std::uint64_t Hash(const Call& call, std::uint64_t hash) {
  for (const Array& result : call.results) {
    const auto* const bytes = static_cast<const unsigned char*>(result.data);
    const std::size_t n = result.scratch ? 0 : result.bytes();
    for (std::size_t i = 0; i < n; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3u;  // FNV-1a
  }
  return hash;
}

}  // namespace

Heap::Heap(Call& call, Random random, unsigned char poison) {
  for (std::size_t i = 0; i < call.arrays(); ++i) {
    Array& array = call.array(i);
    const std::size_t bytes = array.bytes();
    array.data = bytes == 0 ? nullptr : std::malloc(bytes);
    blocks_.push_back(array.data);
    if (bytes > 0) std::memset(array.data, poison, bytes);
  }
  FillOperands(call, random);
}

Heap::~Heap() {
  for (void* const block : blocks_) std::free(block);
}

int CompareResults(const Call& call, const Call& expected, const char* what) {
  int failures = 0;
  for (std::size_t i = 0; i < call.results.size(); ++i) {
    const Array &result = call.results[i], &other = expected.results[i];
    if (result.scratch || result.bytes() == 0) continue;
    const auto *a = static_cast<const unsigned char*>(result.data),
               *b = static_cast<const unsigned char*>(other.data);
    const auto differs = std::mismatch(a, a + result.bytes(), b).first - a;
    if (static_cast<std::size_t>(differs) == result.bytes()) continue;
    failures += Fail(call, "%s: %s differs from element %td on", what, result.name.c_str(),
                     differs / static_cast<std::ptrdiff_t>(result.width()));
  }
  return failures;
}

int CheckMemory(Handlers handlers, int variants, bool large) {
  int failures = 0;
  GuardedMemory memory;
  Pool pool(Helpers::kNone, 1), threads(Helpers::kThreads, 3);
  const std::vector<Shape> shapes = Shapes(large);
  for (const NamedHandler& handler : handlers) {
    int calls = 0;
    std::uint64_t hash = 0xcbf29ce484222325u;
    for (const auto dtype : {XLA_FFI_DataType_F32, XLA_FFI_DataType_F64, XLA_FFI_DataType_F16,
                             XLA_FFI_DataType_BF16}) {
      for (std::size_t s = 0; s < shapes.size(); ++s) {
        // The options differ between variants.
        for (int variant = 0; variant < variants; ++variant) {
          const Random random(static_cast<std::uint64_t>(variant) * 1000 + s * 4 +
                              static_cast<std::uint64_t>(dtype));
          Call expected = MakeCall(handler.name, dtype, shapes[s], random);
          const Heap heap(expected, random, 0xcb);
          if (const auto error = Frame(expected).Run(handler.call, pool)) {
            failures += Fail(expected, "%s", error->message.c_str());
            continue;
          }
          hash = Hash(expected, hash);
          failures += CheckPlaced(handler, expected, random, pool, memory);
          failures += CheckAgain(handler, expected, random, threads, /*in_place=*/false);
          if (MayBeInPlace(handler.name)) {
            failures += CheckAgain(handler, expected, random, pool, /*in_place=*/true);
            ++calls;
          }
          calls += 2 + static_cast<int>(kPlacements.size());
        }
      }
    }
    std::printf("memory %s: %d calls, results %016llx\n", handler.name, calls,
                static_cast<unsigned long long>(hash));
  }
  return failures;
}

}  // namespace gradops::native
