// Calls as XLA makes them: several at a time, on the threads of its pool. All calls may wait.
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "checks.h"

namespace gradops::native {
namespace {

// A call and its results without helpers.
struct Case {
  NamedHandler handler;
  Random random;
  Call call;
  std::unique_ptr<Heap> heap;
};

std::vector<Case> Cases(Handlers handlers) {
  // The calls have several chunks each.
  const Shape shape{.groups = {2}, .rows = {400}, .features = 67, .inner = {5}};
  std::vector<Case> cases;
  Pool alone(Helpers::kNone, 1);
  for (const NamedHandler& handler : handlers) {
    for (const auto dtype : {XLA_FFI_DataType_F32, XLA_FFI_DataType_BF16}) {
      const Random random(cases.size());
      Case c{handler, random, MakeCall(handler.name, dtype, shape, random), nullptr};
      c.heap = std::make_unique<Heap>(c.call, random, 0);
      Frame(c.call).Run(handler.call, alone);
      cases.push_back(std::move(c));
    }
  }
  return cases;
}

int RunCase(const Case& c, Pool& pool, const char* how) {
  Call call = c.call;
  const Heap heap(call, c.random, 0xff);
  if (const auto error = Frame(call).Run(c.handler.call, pool)) {
    return Fail(call, "%s: %s", how, error->message.c_str());
  }
  return CompareResults(call, c.call, how);
}

}  // namespace

int CheckThreads(Handlers handlers, int rounds) {
  const std::vector<Case> cases = Cases(handlers);
  std::atomic<int> failures = 0, calls = 0;
  const auto run = [&](const Case& c, Pool& pool, const char* how) {
    failures += RunCase(c, pool, how);
    ++calls;
  };
  for (int round = 0; round < rounds; ++round) {
    alarm(120);  // treats a long run as a deadlock
    for (const Case& c : cases) {
      {
        Pool late(Helpers::kLate, 4);
        run(c, late, "helpers that come too late");
      }
      Pool refusing(Helpers::kRefuse, 4);
      run(c, refusing, "helpers that cannot be had");
    }
    // All threads of the pool are in handlers, and wait for each other's helpers. Two threads that
    // are not the pool's do so too.
    Pool pool(Helpers::kThreads, 3);
    const std::size_t tasks = 2 * cases.size();
    std::atomic<std::size_t> left = tasks;
    for (std::size_t i = 0; i < tasks; ++i) {
      pool.Schedule([&, i] {
        run(cases[i % cases.size()], pool, "on the pool");
        --left;
      });
    }
    std::vector<std::thread> outside;
    for (int t = 0; t < 2; ++t) {
      outside.emplace_back([&] {
        for (const Case& c : cases) run(c, pool, "beside the pool");
      });
    }
    for (std::thread& thread : outside) thread.join();
    while (left.load() > 0) std::this_thread::yield();
  }
  alarm(0);
  std::printf("threads: %d calls\n", calls.load());
  return failures;
}

}  // namespace gradops::native
