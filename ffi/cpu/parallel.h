// Deterministic parallel loops on XLA's own thread pool, by the caller-runs pattern.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>

#include "common/handler.h"

namespace gradops {

// Calls body(context, chunk) for every chunk in [0, chunks), in any order, on any thread, and
// returns when all are done. Chunks must be cut by the size of the problem, never by the number of
// threads: then results do not depend on who ran what.
//
// Waiting in a handler for scheduled tasks deadlocks ordinary graphs: handlers run on the pool's
// own threads, so all of them may wait while nobody works. Hence the caller takes part: chunks are
// claimed from a counter, helpers are scheduled as best effort, the caller claims until none is
// left, and then waits only for chunks that a live thread already runs. A helper that comes too
// late touches nothing but the shared state. What a body throws, memory that there is not, the
// caller throws once all chunks are done.
inline void ParallelChunks(const CpuContext& pool, std::int64_t chunks,
                           void (*body)(const void*, std::int64_t), const void* context) {
  const std::int64_t helpers = std::min(pool.num_threads(), chunks) - 1;
  if (helpers <= 0) {
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) body(context, chunk);
    return;
  }
  struct State {
    std::atomic<std::int64_t> next{0};
    std::mutex mutex;
    std::condition_variable all_done;
    // Guarded by mutex.
    std::int64_t done = 0;
    std::exception_ptr failure;
  };
  const auto state = std::make_shared<State>();
  const auto work = [state, chunks, body, context] {
    std::int64_t finished = 0;
    std::exception_ptr failure;
    for (;; ++finished) {
      const std::int64_t chunk = state->next.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= chunks) break;
      try {
        // `context` outlives every claimed chunk, as the caller waits for those.
        body(context, chunk);
      } catch (...) {
        failure = std::current_exception();
      }
    }
    if (finished == 0) return;
    const std::lock_guard lock(state->mutex);
    if (failure) state->failure = failure;
    state->done += finished;
    if (state->done == chunks) state->all_done.notify_one();
  };
  try {
    for (std::int64_t i = 0; i < helpers; ++i) {
      const_cast<CpuContext&>(pool).Schedule(std::function<void()>(work));
    }
  } catch (const std::bad_alloc&) {
    // Fewer helpers, then.
  }
  work();
  std::unique_lock lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done == chunks; });
  if (state->failure) std::rethrow_exception(state->failure);
}

// The same with a function object. Only this is compiled for each of them.
template <typename Body>
void ParallelFor(const CpuContext& pool, std::int64_t chunks, const Body& body) {
  ParallelChunks(
      pool, chunks,
      [](const void* context, std::int64_t chunk) { (*static_cast<const Body*>(context))(chunk); },
      &body);
}

// Below this many bytes of traffic a chunk is not worth handing to another thread.
inline constexpr std::int64_t kMinChunkBytes = 64 << 10;
// Chunks are longer where there would be more than so many, as memory is read at full speed only
// some time after a start. Tuned on two cores; on 48 threads 64 chunks of a size leave some idle.
// Two cores of a Zen 5, sums of squares of float32 [8192, 2048] in chunks of 64 KB, 256 KB, 1 MB
// and 4 MB: 43, 62, 71 and, in a slower hour, 57 GB/s, where XLA had 44 to 47. Of twice as many
// chunks [2048, 2048] takes up to 15 % longer.
inline constexpr std::int64_t kManyChunks = 64, kLongChunkBytes = 1 << 20;

// How many rows a chunk has, at most `max_chunks` chunks in all. Depends on the shape alone. For
// what should stay in a cache, long_chunk_bytes is kMinChunkBytes.
inline std::int64_t RowsPerChunk(std::int64_t rows, std::int64_t bytes_per_row,
                                 std::int64_t max_chunks,
                                 std::int64_t long_chunk_bytes = kLongChunkBytes) {
  bytes_per_row = std::max<std::int64_t>(1, bytes_per_row);
  const std::int64_t bytes =
      std::clamp(rows / kManyChunks * bytes_per_row, kMinChunkBytes, long_chunk_bytes);
  const std::int64_t by_count = (rows + max_chunks - 1) / std::max<std::int64_t>(1, max_chunks);
  return std::max({std::int64_t{1}, bytes / bytes_per_row, by_count});
}

}  // namespace gradops
