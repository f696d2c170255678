// Runs checks by name, for main.cc. As a shared library, for tests/test_native.py.
#include <cstdio>
#include <string_view>

#include "checks.h"

// Returns the number of failures, or -1 if no check has this name.
extern "C" [[gnu::visibility("default")]] int RunCheck(const char* check,
                                                       const gradops::NamedHandler* handlers,
                                                       std::size_t count) {
  using namespace gradops::native;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  DescribeCrashes();
  const Handlers all(handlers, count);
  const std::string_view name = check;
  if (name == "malformed") return CheckMalformed(all);
  // The numbers are variants of each call, or rounds.
  if (name == "memory-short") return CheckMemory(all, 1, /*large=*/false);
  if (name == "memory") return CheckMemory(all, 3, /*large=*/false);
  if (name == "memory-long") return CheckMemory(all, 2, /*large=*/true);
  if (name == "threads-short") return CheckThreads(all, 1);
  if (name == "threads") return CheckThreads(all, 3);
  if (name == "threads-long") return CheckThreads(all, 100);
  return -1;
}
