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

// Calls body(context, chunk) for every chunk in [0, chunks), in any order, on any thread. Returns
// when all chunks are done. Chunks must be cut by the size of the problem, never by the number of
// threads. Then results do not depend on which thread ran a chunk.
//
// A handler must not wait for scheduled tasks: handlers run on the pool's own threads. All threads
// might wait while nobody works, and ordinary graphs would deadlock. Hence the caller takes part.
// Chunks are claimed from a counter, and helpers are scheduled as best effort. The caller claims
// chunks until all are claimed. Then it waits only for chunks that a live thread already runs. A
// helper that comes too late touches nothing but the shared state. A body may throw if memory runs
// out. The caller throws this exception when all chunks are done.
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
        // `context` outlives every claimed chunk: the caller waits for claimed chunks.
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
    // The loop goes on with fewer helpers.
  }
  work();
  std::unique_lock lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done == chunks; });
  if (state->failure) std::rethrow_exception(state->failure);
}

// ParallelChunks with a function object. Only this small function is compiled for each Body.
template <typename Body>
void ParallelFor(const CpuContext& pool, std::int64_t chunks, const Body& body) {
  ParallelChunks(
      pool, chunks,
      [](const void* context, std::int64_t chunk) { (*static_cast<const Body*>(context))(chunk); },
      &body);
}

// A chunk with fewer bytes of traffic is not worth handing to another thread.
inline constexpr std::int64_t kMinChunkBytes = 64 << 10;
// Chunks are longer if there would be more than kManyChunks of them. The reason: memory is read at
// full speed only some time after a chunk's start. Tuned on two cores. 64 chunks of equal size
// leave some of 48 threads idle. Sums of squares of float32 [8192, 2048] on two cores of a Zen 5
// (XLA had 44 to 47 GB/s):
//   chunks of   64 KB  256 KB  1 MB  4 MB, in a slower hour
//   GB/s        43     62      71    57
//
// With twice the number of chunks, [2048, 2048] takes up to 15 % longer.
inline constexpr std::int64_t kManyChunks = 64, kLongChunkBytes = 1 << 20;

// The number of rows of a chunk. It depends on the shape alone. There are at most `max_chunks`
// chunks. For data that should stay in a cache, long_chunk_bytes is kMinChunkBytes. A chunk has at
// least min_chunk_bytes.
inline std::int64_t RowsPerChunk(std::int64_t rows, std::int64_t bytes_per_row,
                                 std::int64_t max_chunks,
                                 std::int64_t long_chunk_bytes = kLongChunkBytes,
                                 std::int64_t min_chunk_bytes = kMinChunkBytes) {
  bytes_per_row = std::max<std::int64_t>(1, bytes_per_row);
  const std::int64_t bytes =
      std::clamp(rows / kManyChunks * bytes_per_row, min_chunk_bytes, long_chunk_bytes);
  const std::int64_t by_count = (rows + max_chunks - 1) / std::max<std::int64_t>(1, max_chunks);
  return std::max({std::int64_t{1}, bytes / bytes_per_row, by_count});
}

}  // namespace gradops
