// How batch norm's blocks get their vectors. Each thread copies its own vectors to shared memory,
// one chunk ahead of the vector that it works on. It waits only for its own copies. Single elements
// cannot be copied in this way: a chunk of them is loaded to registers. README.md has the words.
#pragma once

#include <cstdint>

#include "cuda/batch_norm/plan.h"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vector.cuh"

namespace gradops {
namespace {

// A thread's vectors, step by step.
template <bool kBackwards>
class VectorWalk {
 public:
  __device__ __forceinline__ VectorWalk(const ChannelPlan& plan, const ChannelPart& part,
                                        std::int64_t step)
      : plan_(plan),
        place_(plan.PlaceOf(part, step, static_cast<int>(threadIdx.x))),
        limit_(plan.Limit(part)) {}

  __device__ __forceinline__ bool idle() const { return place_.vector < 0; }
  __device__ __forceinline__ bool whole() const { return plan_.Whole(place_, limit_); }
  __device__ __forceinline__ std::int64_t start() const { return plan_.Start(place_); }
  __device__ __forceinline__ void Move() {
    plan_.Move(place_, kBackwards ? plan_.to_previous : plan_.to_next);
  }

 private:
  const ChannelPlan& plan_;
  VectorPlace place_;
  std::int64_t limit_;
};

// A thread's place in a stage, with a vector of each of kArrays arrays and of the transient array.
template <typename T, int W, int kArrays>
struct StagePlace {
  std::uint32_t at, pitch, transient;  // pitch: from one array's vector to the next array's

  __device__ __forceinline__ std::uint32_t At(int array) const {
    return at + static_cast<std::uint32_t>(array) * pitch;
  }
  __device__ __forceinline__ void Copy(int array, const T* from) { CopyAsync(At(array), from); }
  __device__ __forceinline__ void Copy(int array, const T* from, bool evict_first) {
    CopyAsync(At(array), from, evict_first);
  }
  __device__ __forceinline__ void CopyTransient(const T* from) { CopyAsync(transient, from); }
  __device__ __forceinline__ static Vector<T, W> Load(std::uint32_t from) {
    return LoadPlain<W>(static_cast<const T*>(__cvta_shared_to_generic(from)));
  }
  __device__ __forceinline__ Vector<T, W> Get(int array) const { return Load(At(array)); }
  __device__ __forceinline__ Vector<T, W> GetTransient() const { return Load(transient); }
  __device__ __forceinline__ void Put(int array, const Vector<T, W>& vector) {
    StoreVector(static_cast<T*>(__cvta_shared_to_generic(At(array))), vector);
  }
};

// For single elements, in registers. Elements that stay are in shared memory (Stages::Element).
template <typename T, int kArrays>
struct StagePlace<T, 1, kArrays> {
  Vector<T, 1> values[kArrays + 1];

  __device__ __forceinline__ void Copy(int array, const T* from) { values[array].v[0] = *from; }
  __device__ __forceinline__ void Copy(int array, const T* from, bool) { Copy(array, from); }
  __device__ __forceinline__ void CopyTransient(const T* from) { Copy(kArrays, from); }
  __device__ __forceinline__ Vector<T, 1> Get(int array) const { return values[array]; }
  __device__ __forceinline__ Vector<T, 1> GetTransient() const { return values[kArrays]; }
  __device__ __forceinline__ void Put(int array, const Vector<T, 1>& value) {
    values[array] = value;
  }
};

// A block's stages. Each kept chunk has stages of its own. All other chunks share some stages.
template <typename T, int W, int kArrays, int kSteps>
class Stages {
 public:
  using Place = StagePlace<T, W, kArrays>;

  __device__ __forceinline__ Stages(const ChannelPlan& plan, char* shared)
      : shared_(SharedAddress(shared)),
        // The compiler must not know that this is equal for all threads: see CopyAsync.
        pitch_(static_cast<std::uint32_t>(plan.array_stage_bytes) +
               plan.unknown_zero * threadIdx.x),
        kept_(plan.kept_chunks) {}

  __device__ __forceinline__ void BeginPart(const ChannelPlan& plan, const ChannelPart& part) {
    first_ = part.first_chunk;
    const int place = plan.StagePlace(part, static_cast<int>(threadIdx.x)) * W;
    const std::uint32_t thread = shared_ + static_cast<std::uint32_t>(place) * sizeof(T);
    thread_ = thread + static_cast<std::uint32_t>(plan.scratch_bytes);
    transient_ = thread + static_cast<std::uint32_t>(plan.transient_offset);
  }
  // Whether a chunk of the part is kept, and the address of its stages.
  __device__ __forceinline__ bool kept(int chunk) const { return first_ + chunk < kept_; }
  __device__ __forceinline__ std::uint32_t Of(int chunk) const {
    return thread_ +
           static_cast<std::uint32_t>(min(first_ + chunk, kept_) * kSteps * kArrays) * pitch_;
  }
  // The place in the k-th of some stages; for single elements, the place of one array's element.
  __device__ __forceinline__ Place At(std::uint32_t stages, int k) const {
    return {stages + static_cast<std::uint32_t>(k * kArrays) * pitch_, pitch_,
            transient_ + static_cast<std::uint32_t>(k) * pitch_};
  }
  __device__ __forceinline__ T* Element(int chunk, int k, int array) const {
    return static_cast<T*>(__cvta_shared_to_generic(
        Of(chunk) + static_cast<std::uint32_t>(k * kArrays + array) * pitch_));
  }

 private:
  std::uint32_t shared_, pitch_, thread_ = 0, transient_ = 0;
  int kept_, first_ = 0;
};

// Calls copy(place, start, known), and later use(place, start), for this thread's whole vectors in
// a part. It goes from the first step to the last one, or backwards. end_chunk() follows every
// kSteps steps or fewer. All threads call between() once, when the first copies are on their way.
// Forwards, `known` is true for the first `evict_first` steps: the second pass will not find these
// in the L2 cache. Backwards, it is true if the first pass has left the vectors in shared memory.
// With `last_there`, this holds for the last kSteps steps too.
template <bool kBackwards, typename T, int W, int kArrays, int kSteps>
__device__ __forceinline__ void ForVectors(const ChannelPlan& plan, const ChannelPart& part,
                                           Stages<T, W, kArrays, kSteps>& stages, int evict_first,
                                           bool last_there, const auto& copy, const auto& between,
                                           const auto& use, const auto& end_chunk) {
  const int count = static_cast<int>(part.count), whole = plan.WholeSteps(part);
  stages.BeginPart(plan, part);
  VectorWalk<kBackwards> walk(plan, part, plan.StepOf(part, kBackwards ? count - 1 : 0));
  const bool idle = walk.idle();
  VectorWalk<kBackwards> ahead = walk;
  unsigned copied = 0;  // bit k: this thread's vector of the chunk's k-th step
  const auto known_of = [&](int chunk) {
    return kBackwards ? stages.kept(chunk) : chunk * kSteps < evict_first;
  };
  const auto fetch = [&](std::uint32_t to, int step, bool known) {
    const int k = step % kSteps;
    const bool wanted = step >= 0 && step < count && (step < whole || ahead.whole());
    copied = (copied & ~(1u << k)) | (unsigned{wanted} << k);
    if (wanted) copy(stages.At(to, k), ahead.start(), known);
    CommitCopies();
    ahead.Move();
  };
  if (!idle) {
#pragma unroll 1
    for (int i = 0; i < kSteps; ++i) {
      const int step = kBackwards ? count - 1 - i : i;
      if (step < 0) {
        CommitCopies();
      } else {
        const int chunk = step / kSteps;
        fetch(stages.Of(chunk), step, (kBackwards && last_there) || known_of(chunk));
      }
    }
  }
  between();
  if (idle) return;
  int step = kBackwards ? count - 1 : 0;
  while (kBackwards ? step >= 0 : step < count) {
    const int chunk = step / kSteps, then = kBackwards ? chunk - 1 : chunk + 1;
    const std::uint32_t from = stages.Of(chunk), to = stages.Of(max(then, 0));
    const bool known = known_of(then);
    // All steps of this chunk and of the next one are whole.
    if (kBackwards ? step % kSteps == kSteps - 1 && step < whole && chunk > 0
                   : step + 2 * kSteps <= whole) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int k = kBackwards ? kSteps - 1 - i : i;
        WaitForCopies<kSteps - 1>();
        use(stages.At(from, k), walk.start());
        copy(stages.At(to, k), ahead.start(), known);
        CommitCopies();
        walk.Move(), ahead.Move();
      }
      step += kBackwards ? -kSteps : kSteps;
    } else {
      const int steps = kBackwards ? step % kSteps + 1 : min(kSteps, count - step);
#pragma unroll 1
      for (int i = 0; i < steps; ++i) {
        const int k = step % kSteps;
        WaitForCopies<kSteps - 1>();
        if ((copied >> k & 1) != 0) use(stages.At(from, k), walk.start());
        walk.Move();
        if (kBackwards && step < kSteps) {
          CommitCopies();
        } else {
          fetch(to, kBackwards ? step - kSteps : step + kSteps, known);
        }
        step += kBackwards ? -1 : 1;
      }
    }
    end_chunk();
  }
}

// ForVectors for single elements: a chunk is loaded at a time.
template <bool kBackwards, typename T, int kArrays, int kSteps>
__device__ __forceinline__ void ForVectors(const ChannelPlan& plan, const ChannelPart& part,
                                           Stages<T, 1, kArrays, kSteps>& stages, int, bool,
                                           const auto& copy, const auto& between, const auto& use,
                                           const auto& end_chunk) {
  const int count = static_cast<int>(part.count);
  stages.BeginPart(plan, part);
  between();
  VectorWalk<kBackwards> walk(plan, part, plan.StepOf(part, kBackwards ? count - 1 : 0));
  if (walk.idle()) return;
  VectorWalk<kBackwards> ahead = walk;
  for (int done = 0; done < count;) {
    const int first = kBackwards ? count - 1 - done : done, chunk = first / kSteps;
    const int steps = kBackwards ? first % kSteps + 1 : min(kSteps, count - done);
    const bool kept = stages.kept(chunk);
    StagePlace<T, 1, kArrays> places[kSteps];
    bool wanted[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      wanted[i] = i < steps && ahead.whole();
      if (wanted[i]) copy(places[i], ahead.start(), kBackwards && kept);
      if (i < steps) ahead.Move();
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (wanted[i]) {
        const int k = (kBackwards ? first - i : first + i) % kSteps;
        for (int a = 0; a < kArrays && kBackwards && kept; ++a) {
          places[i].Put(a, {*stages.Element(chunk, k, a)});
        }
        use(places[i], walk.start());
        for (int a = 0; a < kArrays && !kBackwards && kept; ++a) {
          *stages.Element(chunk, k, a) = places[i].Get(a).v[0];
        }
      }
      if (i < steps) walk.Move();
    }
    done += steps;
    end_chunk();
  }
}

// --- Dynamic chunks ------------------------------------------------------------------------------

// The second pass over the steps of a tile that no block has kept, from the last chunk to the
// first. Most chunks are given to the tile's blocks in turn. The others are taken by whichever
// block is free, so that all blocks end together. Warp w of every block has the same vectors of
// each step. These warps share a counter of the chunks that are given and taken.
template <int kSteps, int W>
__device__ __forceinline__ void ForDynamicChunks(const ChannelPlan& plan, const ChannelPart& part,
                                                 const auto& stages, unsigned* counter,
                                                 const auto& copy, const auto& between,
                                                 const auto& use) {
  const VectorPlace place = plan.PlaceOf(part, 0, static_cast<int>(threadIdx.x));
  const bool idle = place.vector < 0;
  const std::int64_t limit = plan.Limit(part);
  const std::int64_t kept = plan.kept_chunks * kSteps * plan.tile_blocks;  // steps
  const std::uint32_t shared = stages.Of(plan.kept_chunks);
  const auto step_of = [&](int chunk, int k) { return plan.steps - (chunk + 1) * kSteps + k; };
  const auto start_of = [&](int chunk, int k) {
    return place.at + step_of(chunk, k) * plan.step_rows * plan.row_elements;
  };
  const auto whole = [&](int chunk) {
    return step_of(chunk, 0) >= kept && step_of(chunk, kSteps) <= plan.whole_steps;
  };
  const auto has = [&](int chunk, int k) {
    return !idle && step_of(chunk, k) >= kept && start_of(chunk, k) + W <= limit;
  };
  const auto fetch = [&](int chunk, int k) {
    if (has(chunk, k)) copy(stages.At(shared, k), start_of(chunk, k), false);
    CommitCopies();
  };
  const int block = static_cast<int>(part.first);  // the block's number among the tile's blocks
  const int tile_blocks = static_cast<int>(plan.tile_blocks);
#pragma unroll 1
  for (int k = 0; k < kSteps; ++k) fetch(block, k);
  between();
  int chunk = block, next = chunk + tile_blocks;
  for (int taken = 2; chunk < plan.dynamic_chunks; ++taken) {
    const bool given = taken < plan.static_chunks;
    unsigned from_counter = 0;
    if (!given && threadIdx.x % kWarp == 0) from_counter = atomicAdd(counter, 1u);
    if (whole(chunk) && whole(next)) {
      if (!idle) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          WaitForCopies<kSteps - 1>();
          use(stages.At(shared, k), start_of(chunk, k));
          copy(stages.At(shared, k), start_of(next, k), false);
          CommitCopies();
        }
      }
    } else {
#pragma unroll 1
      for (int k = 0; k < kSteps; ++k) {
        WaitForCopies<kSteps - 1>();
        if (has(chunk, k)) use(stages.At(shared, k), start_of(chunk, k));
        fetch(next, k);
      }
    }
    chunk = next;
    next = given ? block + taken * tile_blocks
                 : static_cast<int>(__shfl_sync(0xffffffffu, from_counter, 0));
  }
}

// The second pass over the steps of a part: first dynamic chunks, if there are any, then others.
template <typename T, int W, int kArrays, int kSteps>
__device__ __forceinline__ void ForSecondPass(const ChannelPlan& plan, ChannelPart part,
                                              Stages<T, W, kArrays, kSteps>& stages,
                                              bool last_there, unsigned* counter, const auto& copy,
                                              const auto& between, const auto& use) {
  if constexpr (W > 1) {
    if (!plan.plane && plan.dynamic_chunks > 0) {
      stages.BeginPart(plan, part);
      ForDynamicChunks<kSteps, W>(plan, part, stages, counter, copy, between, use);
      part.count = plan.kept_chunks * kSteps;
      ForVectors<true>(plan, part, stages, 0, false, copy, [] {}, use, [] {});
      return;
    }
  }
  ForVectors<true>(plan, part, stages, 0, last_there, copy, between, use, [] {});
}

}  // namespace
}  // namespace gradops
