// How the blocks of batch norm's main kernels get their packs. Each thread copies its own packs to
// shared memory, one ring ahead of the pack that it works on. It waits only for its own copies.
//
// The bytes under way while threads compute decide how fast memory is read. Packs of one element
// cannot be copied in this way: a ring of them is loaded to registers, and then worked on.
#pragma once

#include <cstdint>

#include "cuda/batch_norm/plan.h"
#include "cuda/batch_norm/rings.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/reduce.cuh"

namespace gradops {
namespace {

// Calls copy(place, start, known), and later use(place, start), for this thread's packs in a part's
// steps: from the first step on, or backwards from the last one. Packs that are not whole are left
// out. All threads call between() once, when the first copies are on their way. end_ring() is
// called after every kSteps steps or fewer.
//
// Forwards, `known` is true for the first `passing` steps: the second pass will not find these in
// the L2 cache. Backwards, it is true if the first pass has left the packs in shared memory. With
// `found`, this holds for the last kSteps steps too.
template <bool kBackwards, typename T, int W, int kArrays, int kSteps, typename Copy,
          typename Between, typename Use, typename EndRing>
__device__ __forceinline__ void ForPacks(const ChannelPlan& plan, const ChannelPart& part,
                                         PackRings<T, W, kArrays, kSteps>& rings, int passing,
                                         bool found, const Copy& copy, const Between& between,
                                         const Use& use, const EndRing& end_ring) {
  const int count = static_cast<int>(part.count), whole = plan.WholeSteps(part);
  rings.BeginPart(plan, part);
  PackWalk<kBackwards> walk(plan, part, plan.StepOf(part, kBackwards ? count - 1 : 0));
  const bool idle = walk.idle();
  PackWalk<kBackwards> ahead = walk;
  unsigned there = 0;  // bit k: this thread's pack of the ring's k-th step was copied
  const auto known_of = [&](int ring) {
    return kBackwards ? rings.stays(ring) : ring * kSteps < passing;
  };
  const auto fetch = [&](std::uint32_t ring, int step, bool known) {
    const int k = step % kSteps;
    const bool wanted = step >= 0 && step < count && (step < whole || ahead.whole());
    there = (there & ~(1u << k)) | (unsigned{wanted} << k);
    if (wanted) copy(rings.Place(ring, k), ahead.start(), known);
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
        fetch(rings.Ring(step / kSteps), step, (kBackwards && found) || known_of(step / kSteps));
      }
    }
  }
  between();
  if (idle) return;
  int step = kBackwards ? count - 1 : 0;
  while (kBackwards ? step >= 0 : step < count) {
    const int number = step / kSteps, then = kBackwards ? number - 1 : number + 1;
    const std::uint32_t ring = rings.Ring(number), next = rings.Ring(max(then, 0));
    const bool known = known_of(then);
    // All steps of this ring and of the next one are whole.
    if (kBackwards ? step % kSteps == kSteps - 1 && step < whole && number > 0
                   : step + 2 * kSteps <= whole) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int k = kBackwards ? kSteps - 1 - i : i;
        WaitForCopies<kSteps - 1>();
        use(rings.Place(ring, k), walk.start());
        copy(rings.Place(next, k), ahead.start(), known);
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
        if ((there >> k & 1) != 0) use(rings.Place(ring, k), walk.start());
        walk.Move();
        if (kBackwards && step < kSteps) {
          CommitCopies();
        } else {
          fetch(next, kBackwards ? step - kSteps : step + kSteps, known);
        }
        step += kBackwards ? -1 : 1;
      }
    }
    end_ring();
  }
}

// The second pass over the steps of a tile that no block has kept. It goes ring by ring, from the
// last steps to the first. Most rings are given to the tile's blocks in turn. The others are taken
// by whichever block is free, so that all blocks end together. Warp w of every block has the same
// part of each step. These warps share a counter of the rings that are given and taken.
template <typename T, int W, int kArrays, int kSteps>
class SharedSteps {
 public:
  __device__ __forceinline__ SharedSteps(const ChannelPlan& plan, const ChannelPart& part,
                                         const PackRings<T, W, kArrays, kSteps>& rings,
                                         unsigned* counter)
      : plan_(plan),
        rings_(rings),
        slots_(rings.Ring(plan.kept_rings)),
        counter_(counter),
        number_(static_cast<int>(part.first)),
        limit_(plan.Limit(part)) {
    const ChannelPlace place = plan.PlaceOf(part, 0, static_cast<int>(threadIdx.x));
    idle_ = place.pack < 0, origin_ = place.at;
  }

  template <typename Copy>
  __device__ __forceinline__ void Begin(const Copy& copy) {
#pragma unroll 1
    for (int k = 0; k < kSteps; ++k) Fetch(number_, k, copy);
  }

  template <typename Copy, typename Use>
  __device__ __forceinline__ void Run(const Copy& copy, const Use& use) {
    const int stride = static_cast<int>(plan_.stride);
    int ring = number_, next = ring + stride;
    for (int turn = 2; ring < plan_.shared_rings; ++turn) {
      const bool given = turn < plan_.given_rings;
      unsigned taken = 0;
      if (!given && threadIdx.x % kWarp == 0) taken = atomicAdd(counter_, 1u);
      if (Whole(ring) && Whole(next)) {
        if (!idle_) {
#pragma unroll
          for (int k = 0; k < kSteps; ++k) {
            WaitForCopies<kSteps - 1>();
            use(rings_.Place(slots_, k), StartOf(ring, k));
            copy(rings_.Place(slots_, k), StartOf(next, k), false);
            CommitCopies();
          }
        }
      } else {
#pragma unroll 1
        for (int k = 0; k < kSteps; ++k) {
          WaitForCopies<kSteps - 1>();
          if (Has(ring, k)) use(rings_.Place(slots_, k), StartOf(ring, k));
          Fetch(next, k, copy);
        }
      }
      ring = next;
      next = given ? number_ + turn * stride : static_cast<int>(__shfl_sync(0xffffffffu, taken, 0));
    }
  }

 private:
  __device__ __forceinline__ std::int64_t StepOf(int ring, int k) const {
    return plan_.steps - (ring + 1) * kSteps + k;
  }
  __device__ __forceinline__ std::int64_t StartOf(int ring, int k) const {
    return origin_ + StepOf(ring, k) * plan_.at_once * plan_.row_elements;
  }
  __device__ __forceinline__ std::int64_t kept() const {
    return plan_.kept_rings * kSteps * plan_.stride;
  }
  __device__ __forceinline__ bool Whole(int ring) const {
    return StepOf(ring, 0) >= kept() && StepOf(ring, kSteps) <= plan_.whole_steps;
  }
  __device__ __forceinline__ bool Has(int ring, int k) const {
    return !idle_ && StepOf(ring, k) >= kept() && StartOf(ring, k) + W <= limit_;
  }
  template <typename Copy>
  __device__ __forceinline__ void Fetch(int ring, int k, const Copy& copy) {
    if (Has(ring, k)) copy(rings_.Place(slots_, k), StartOf(ring, k), false);
    CommitCopies();
  }

  const ChannelPlan& plan_;
  const PackRings<T, W, kArrays, kSteps>& rings_;
  std::uint32_t slots_;
  unsigned* counter_;
  int number_;
  bool idle_;
  std::int64_t limit_, origin_;
};

// ForPacks for single elements: a ring is loaded at a time.
template <bool kBackwards, typename T, int kArrays, int kSteps, typename Copy, typename Between,
          typename Use, typename EndRing>
__device__ __forceinline__ void ForPacks(const ChannelPlan& plan, const ChannelPart& part,
                                         PackRings<T, 1, kArrays, kSteps>& rings, int, bool,
                                         const Copy& copy, const Between& between, const Use& use,
                                         const EndRing& end_ring) {
  const int count = static_cast<int>(part.count);
  rings.BeginPart(plan, part);
  between();
  PackWalk<kBackwards> walk(plan, part, plan.StepOf(part, kBackwards ? count - 1 : 0));
  if (walk.idle()) return;
  PackWalk<kBackwards> ahead = walk;
  for (int done = 0; done < count;) {
    const int first = kBackwards ? count - 1 - done : done, number = first / kSteps;
    const int steps = kBackwards ? first % kSteps + 1 : min(kSteps, count - done);
    const bool stays = rings.stays(number);
    PackPlace<T, 1, kArrays> places[kSteps];
    bool wanted[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      wanted[i] = i < steps && ahead.whole();
      if (wanted[i]) copy(places[i], ahead.start(), kBackwards && stays);
      if (i < steps) ahead.Move();
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (wanted[i]) {
        const int k = (kBackwards ? first - i : first + i) % kSteps;
        for (int a = 0; a < kArrays && kBackwards && stays; ++a) {
          places[i].Put(a, {*rings.Element(number, k, a)});
        }
        use(places[i], walk.start());
        for (int a = 0; a < kArrays && !kBackwards && stays; ++a) {
          *rings.Element(number, k, a) = places[i].Get(a).v[0];
        }
      }
      if (i < steps) walk.Move();
    }
    done += steps;
    end_ring();
  }
}

// The second pass over the steps of a part: first shared rings, if the plan has any, then others.
template <typename T, int W, int kArrays, int kSteps, typename Copy, typename Between, typename Use>
__device__ __forceinline__ void ForSecondPass(const ChannelPlan& plan, ChannelPart part,
                                              PackRings<T, W, kArrays, kSteps>& rings, bool found,
                                              unsigned* counter, const Copy& copy,
                                              const Between& between, const Use& use) {
  if constexpr (W > 1) {
    if (!plan.plane && plan.shared_rings > 0) {
      rings.BeginPart(plan, part);
      SharedSteps<T, W, kArrays, kSteps> steps(plan, part, rings, counter);
      steps.Begin(copy);
      between();
      steps.Run(copy, use);
      part.count = plan.kept_rings * kSteps;
      ForPacks<true>(plan, part, rings, 0, false, copy, [] {}, use, [] {});
      return;
    }
  }
  ForPacks<true>(plan, part, rings, 0, found, copy, between, use, [] {});
}

}  // namespace
}  // namespace gradops
