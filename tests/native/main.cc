// Runs the checks with handlers that are compiled in, for sanitizers and valgrind.
//
//   driver CHECK...   the checks of driver.cc, and "allocations"
#include <cstdio>
#include <cstring>
#include <string_view>
#include <vector>

#include "checks.h"

extern "C" int RunCheck(const char*, const gradops::NamedHandler*, std::size_t);

int main(int argc, char** argv) {
  using namespace gradops;
  const std::vector<NamedHandler> handlers = HandlersOf<CpuContext>(native::DriverOps());
  int failures = 0;
  for (int i = 1; i < argc; ++i) {
    const int found = std::string_view(argv[i]) == "allocations"
                          ? native::CheckAllocations(handlers)
                          : RunCheck(argv[i], handlers.data(), handlers.size());
    if (found < 0) {
      std::fprintf(stderr, "no such check: %s\n", argv[i]);
      return 2;
    }
    failures += found;
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
