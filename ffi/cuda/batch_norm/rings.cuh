// Where the blocks of batch norm's main kernels have the packs that are on their way: in rings in
// shared memory. Each thread has its own places there. Single elements are in registers instead.
#pragma once

#include <cstdint>

#include "cuda/batch_norm/plan.h"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/vector.cuh"

namespace gradops {
namespace {

// Walks over this thread's packs, step by step.
template <bool kBackwards>
class PackWalk {
 public:
  __device__ __forceinline__ PackWalk(const ChannelPlan& plan, const ChannelPart& part,
                                      std::int64_t step)
      : plan_(plan),
        place_(plan.PlaceOf(part, step, static_cast<int>(threadIdx.x))),
        limit_(plan.Limit(part)) {}

  __device__ __forceinline__ bool idle() const { return place_.pack < 0; }
  __device__ __forceinline__ bool whole() const { return plan_.Whole(place_, limit_); }
  __device__ __forceinline__ std::int64_t start() const { return plan_.Start(place_); }
  __device__ __forceinline__ void Move() {
    plan_.Move(place_, kBackwards ? plan_.backward : plan_.forward);
  }

 private:
  const ChannelPlan& plan_;
  ChannelPlace place_;
  std::int64_t limit_;
};

// The places of a thread's packs of one step. Packs of kArrays arrays may stay from the first pass
// for the second. One more array, the "other", never stays.
template <typename T, int W, int kArrays>
class PackPlace {
 public:
  __device__ __forceinline__ PackPlace(std::uint32_t at, std::uint32_t pitch, std::uint32_t other)
      : at_(at), pitch_(pitch), other_(other) {}

  __device__ __forceinline__ void Copy(int array, const T* from) { CopyAsync(At(array), from); }
  __device__ __forceinline__ void Copy(int array, const T* from, bool passing) {
    CopyAsync(At(array), from, passing);
  }
  __device__ __forceinline__ void CopyOther(const T* from) { CopyAsync(other_, from); }
  __device__ __forceinline__ Pack<T, W> Get(int array) const { return Load(At(array)); }
  __device__ __forceinline__ Pack<T, W> GetOther() const { return Load(other_); }
  __device__ __forceinline__ void Put(int array, const Pack<T, W>& pack) {
    StorePack(static_cast<T*>(__cvta_shared_to_generic(At(array))), pack);
  }

 private:
  __device__ __forceinline__ std::uint32_t At(int array) const {
    return at_ + static_cast<std::uint32_t>(array) * pitch_;
  }
  __device__ __forceinline__ static Pack<T, W> Load(std::uint32_t at) {
    return LoadPlain<W>(static_cast<const T*>(__cvta_shared_to_generic(at)));
  }

  std::uint32_t at_, pitch_, other_;
};

// For single elements, in registers. Elements that stay are in shared memory (PackRings::Element).
template <typename T, int kArrays>
class PackPlace<T, 1, kArrays> {
 public:
  __device__ __forceinline__ void Copy(int array, const T* from) { packs_[array].v[0] = *from; }
  __device__ __forceinline__ void Copy(int array, const T* from, bool) { Copy(array, from); }
  __device__ __forceinline__ void CopyOther(const T* from) { Copy(kArrays, from); }
  __device__ __forceinline__ Pack<T, 1> Get(int array) const { return packs_[array]; }
  __device__ __forceinline__ Pack<T, 1> GetOther() const { return packs_[kArrays]; }
  __device__ __forceinline__ void Put(int array, const Pack<T, 1>& pack) { packs_[array] = pack; }

 private:
  Pack<T, 1> packs_[kArrays + 1];
};

// A block's rings of kSteps steps in shared memory. The first rings stay. All others use one place
// after these, one after the other. The other array has a ring elsewhere.
template <typename T, int W, int kArrays, int kSteps>
class PackRings {
 public:
  __device__ __forceinline__ PackRings(const ChannelPlan& plan, char* shared)
      : shared_(SharedAddress(shared)),
        // The compiler must not know that this is equal for all threads: see CopyAsync.
        pitch_(static_cast<std::uint32_t>(plan.slot_bytes) + plan.nothing * threadIdx.x),
        kept_(plan.kept_rings) {}

  __device__ __forceinline__ void BeginPart(const ChannelPlan& plan, const ChannelPart& part) {
    first_ = part.ring;
    const int slot = plan.SlotOf(part, static_cast<int>(threadIdx.x)) * W;
    const std::uint32_t thread = shared_ + static_cast<std::uint32_t>(slot) * sizeof(T);
    thread_ = thread + static_cast<std::uint32_t>(plan.scratch_bytes);
    other_ = thread + static_cast<std::uint32_t>(plan.other_at);
  }
  // Whether the part's ring of this number stays, and its address.
  __device__ __forceinline__ bool stays(int ring) const { return first_ + ring < kept_; }
  __device__ __forceinline__ std::uint32_t Ring(int ring) const {
    return thread_ +
           static_cast<std::uint32_t>(min(first_ + ring, kept_) * kSteps * kArrays) * pitch_;
  }
  // The places of a ring's k-th step; for single elements, the place of one array's element.
  __device__ __forceinline__ PackPlace<T, W, kArrays> Place(std::uint32_t ring, int k) const {
    return {ring + static_cast<std::uint32_t>(k * kArrays) * pitch_, pitch_,
            other_ + static_cast<std::uint32_t>(k) * pitch_};
  }
  __device__ __forceinline__ T* Element(int ring, int k, int array) const {
    return static_cast<T*>(__cvta_shared_to_generic(
        Ring(ring) + static_cast<std::uint32_t>(k * kArrays + array) * pitch_));
  }

 private:
  std::uint32_t shared_, pitch_, thread_ = 0, other_ = 0;
  int kept_, first_ = 0;
};

}  // namespace
}  // namespace gradops
