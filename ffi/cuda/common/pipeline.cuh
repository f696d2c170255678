// Asynchronous copies to shared memory, and waiting for them; clusters.
#pragma once

#include <cstdint>

namespace gradops {

__device__ __forceinline__ std::uint32_t SharedAddress(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// Store one value, or load one or four, at a shared address.
template <typename A>
__device__ __forceinline__ void StoreShared(std::uint32_t address, A value) {
  if constexpr (sizeof(A) == 8) {
    asm volatile("st.shared.f64 [%0], %1;" ::"r"(address), "d"(value) : "memory");
  } else {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
  }
}
template <int N, typename A>
__device__ __forceinline__ void LoadShared(std::uint32_t address, A (&values)[N]) {
  static_assert(N == 1 || N == 4);
  if constexpr (N == 1 && sizeof(A) == 8) {
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(values[0]) : "r"(address) : "memory");
  } else if constexpr (N == 1) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(values[0]) : "r"(address) : "memory");
  } else if constexpr (sizeof(A) == 8) {
    asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];"
                 : "=d"(values[0]), "=d"(values[1])
                 : "r"(address)
                 : "memory");
    asm volatile("ld.shared.v2.f64 {%0, %1}, [%2+16];"
                 : "=d"(values[2]), "=d"(values[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
                 : "r"(address)
                 : "memory");
  }
}

// --- cp.async, sm_80: per thread, in groups ------------------------------------------------------

// Copies 16 bytes. A warp's copies should start as far into a line of 128 bytes in shared memory as
// in global memory. Otherwise they are written in three times the number of steps, which costs 10 %
// of the bandwidth.
__device__ __forceinline__ void CopyAsync(std::uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ void CopyAsync(void* shared, const void* global) {
  CopyAsync(SharedAddress(shared), global);
}
// If `passing`, the L2 cache evicts the copied lines before others. There are two instructions
// because a neutral policy is not free: with it, batch norm backward takes 4 % longer. `shared`
// must not be a thread's own number plus a number that the compiler knows to be equal for all
// threads: ptxas 13.0 makes an illegal instruction of that.
__device__ __forceinline__ void CopyAsync(std::uint32_t shared, const void* global, bool passing) {
  std::uint64_t first;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm volatile(
      "{\n"
      ".reg .pred passing;\n"
      "setp.ne.b32 passing, %2, 0;\n"
      "@passing cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %3;\n"
      "@!passing cp.async.cg.shared.global [%0], [%1], 16;\n"
      "}\n" ::"r"(shared),
      "l"(global), "r"(static_cast<int>(passing)), "l"(first)
      : "memory");
}
// Copies 16 bytes if `wanted`, without a branch.
__device__ __forceinline__ void CopyAsyncIf(bool wanted, std::uint32_t shared, const void* global) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %2, 0;\n"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16;\n"
      "}\n" ::"r"(shared),
      "l"(global), "r"(static_cast<int>(wanted))
      : "memory");
}
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- mbarriers, sm_90; elsewhere never called ----------------------------------------------------

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kHopper = true;
#else
inline constexpr bool kHopper = false;
#endif

__device__ __forceinline__ void InitBarrier(std::uint64_t* barrier) {
  if constexpr (kHopper) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(barrier)) : "memory");
  }
}

// Makes initialised barriers known to the cluster.
__device__ __forceinline__ void PublishBarriers() {
  if constexpr (kHopper) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
}

// The barrier's phase ends when this call was made and `bytes` bytes have arrived.
__device__ __forceinline__ void ExpectBytes(std::uint64_t* barrier, std::uint32_t bytes) {
  if constexpr (kHopper) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
        "r"(bytes)
        : "memory");
  }
}

// Waits for what other blocks of the cluster write to this block's shared memory. An acquire at
// block scope is enough, because no cache holds shared memory. At cluster scope, it would empty the
// L1 cache (CCTL.IVALL), which takes 1 to 2 % of layer norm's time.
__device__ __forceinline__ void WaitForPhase(std::uint64_t* barrier, std::uint32_t parity) {
  if constexpr (kHopper) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(SharedAddress(barrier)),
        "r"(parity)
        : "memory");
  }
}

// --- Clusters, sm_90 ----------------------------------------------------------------------------

__device__ __forceinline__ int ClusterRank() {
  if constexpr (kHopper) {
    std::uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
  } else {
    return 0;
  }
}

// The number of this block's cluster in the grid; without clusters, the block's number.
__device__ __forceinline__ unsigned ClusterId() {
  if constexpr (kHopper) {
    unsigned id;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
    return id;
  } else {
    return blockIdx.x;
  }
}

// A barrier of all threads of the cluster, in two steps. A thread may do other work between them.
__device__ __forceinline__ void ClusterArrive() {
  if constexpr (kHopper) {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
}

__device__ __forceinline__ void ClusterWait() {
  if constexpr (kHopper) {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  }
}

// The barrier in one step. After it, all threads see what the others have written before.
__device__ __forceinline__ void ClusterSync() {
  if constexpr (kHopper) {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
  }
}

// Where block `rank` of the cluster has what is at `shared` in this block.
template <typename A>
__device__ __forceinline__ A* InBlock(int rank, A* shared) {
  A* there = shared;
  if constexpr (kHopper) asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(shared), "r"(rank));
  return there;
}

// Writes `value` to `shared` in block `rank` of the cluster. Its `barrier` counts the bytes.
template <typename A>
__device__ __forceinline__ void SendTo(int rank, A* shared, A value, std::uint64_t* barrier) {
  if constexpr (kHopper) {
    std::uint32_t address, remote_barrier;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(SharedAddress(shared)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(remote_barrier)
        : "r"(SharedAddress(barrier)), "r"(rank));
    if constexpr (sizeof(A) == 8) {
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(
              address),
          "l"(__double_as_longlong(value)), "r"(remote_barrier)
          : "memory");
    } else {
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
              address),
          "r"(__float_as_uint(value)), "r"(remote_barrier)
          : "memory");
    }
  }
}

}  // namespace gradops
