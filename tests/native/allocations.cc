// Calls in which an allocation fails. XLA is built without exceptions, so the handler must return
// an error and not crash.
#include <atomic>
#include <cstdlib>
#include <new>

#include "checks.h"

namespace {

std::atomic<std::int64_t> allocations_left = 0;  // 1: the next one fails; 0: none fails

void* Allocate(std::size_t bytes) {
  using gradops::native::Outside;
  if (Outside::depth == 0 && allocations_left.load() > 0 && --allocations_left == 0) {
    throw std::bad_alloc();
  }
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) {
  return Allocate(bytes);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace gradops::native {

int CheckAllocations(Handlers handlers) {
  // 16-bit elements need the most memory. The large calls are cut into several chunks.
  const Shape small{.groups = {2}, .rows = {3}, .features = 131, .inner = {5}};
  const Shape large{.groups = {}, .rows = {260}, .features = 131, .inner = {5}};
  int failures = 0, calls = 0;
  const auto check = [&](const NamedHandler& handler, const Shape& shape, std::uint64_t seed,
                         Pool& pool) {
    Call call = MakeCall(handler.name, XLA_FFI_DataType_BF16, shape, Random(seed));
    const Heap heap(call, Random(seed), 0);
    Frame(call).Run(handler.call, pool);  // the first call makes the handler
    for (std::int64_t n = 1, failed = 1; failed != 0; ++n, ++calls) {
      Frame frame(call);
      allocations_left = n;
      const auto error = frame.Run(handler.call, pool);
      failed = allocations_left.exchange(0) == 0;
      // It is no error if helper threads cannot be started.
      if (error && (!failed || error->code != XLA_FFI_Error_Code_RESOURCE_EXHAUSTED ||
                    error->message != call.op + ": out of memory")) {
        failures +=
            Fail(call, "allocation %lld: %s", static_cast<long long>(n), error->message.c_str());
      }
    }
  };
  // The pools' helpers are always available: otherwise destructors in XLA's header need memory.
  Pool alone(Helpers::kNone, 1), threads(Helpers::kThreads, 2);
  for (const NamedHandler& handler : handlers) {
    for (std::uint64_t seed = 0; seed < 4; ++seed) check(handler, small, seed, alone);
    check(handler, large, 0, threads);
  }
  std::printf("allocations: %d calls\n", calls);
  return failures;
}

}  // namespace gradops::native
