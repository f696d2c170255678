// What the driver does with the handlers of a module. Each check returns how often they failed, and
// prints what it did.
#pragma once

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <span>

#include "frame.h"
#include "ops.h"

namespace gradops::native {

using Handlers = std::span<const NamedHandler>;

// Malformed calls: each gives an error that names op and operand, and the next call works.
int CheckMalformed(Handlers handlers);
// Good calls in memory that ends, or starts, at a page that cannot be read; results are poisoned.
int CheckMemory(Handlers handlers, int variants, bool large);
// Calls on the pool's own threads, with helpers of every kind. Ends the process if it hangs.
int CheckThreads(Handlers handlers, int rounds);
// Calls in which the n-th allocation fails, for each n.
int CheckAllocations(Handlers handlers);

// Memory for a call's arrays of exactly their sizes, from malloc; operands are filled.
class Heap {
 public:
  Heap(Call& call, Random random, unsigned char poison);
  Heap(const Heap&) = delete;
  ~Heap();

 private:
  std::vector<void*> blocks_;
};

// Prints that a call failed, if not too many have. Returns 1.
[[gnu::format(printf, 2, 3)]] inline int Fail(const Call& call, const char* format, ...) {
  static std::atomic<int> failures = 0;
  if (++failures > 20) return 1;
  std::printf("FAILED %s\n  ", Describe(call).c_str());
  va_list args;
  va_start(args, format);
  std::vprintf(format, args);
  va_end(args);
  std::printf("\n");
  return 1;
}

// Whether results hold the same bits; which do not is printed. Scratch does not count.
int CompareResults(const Call& call, const Call& expected, const char* what);

}  // namespace gradops::native
