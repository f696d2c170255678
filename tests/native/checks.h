// The driver's checks of a module's handlers. Each prints what it did, and returns the number of
// failures.
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
// Good calls in memory that ends or starts at an unreadable page. Results are poisoned before.
int CheckMemory(Handlers handlers, int variants, bool large);
// Calls on the pool's threads, with helpers of every kind. Ends the process if a call hangs.
int CheckThreads(Handlers handlers, int rounds);
// Calls in which the n-th allocation fails, for each n.
int CheckAllocations(Handlers handlers);

// Allocates a call's arrays with malloc, in exactly their sizes. Fills the operands.
class Heap {
 public:
  Heap(Call& call, Random random, unsigned char poison);
  Heap(const Heap&) = delete;
  ~Heap();

 private:
  std::vector<void*> blocks_;
};

// Prints that a call failed, up to a limit of messages. Returns 1.
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

// Compares results bitwise and prints differences. Scratch is not compared.
int CompareResults(const Call& call, const Call& expected, const char* what);

}  // namespace gradops::native
