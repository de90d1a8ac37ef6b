// Shared-memory barriers with transaction counts (mbarrier), warpgroup register budgets, named barriers and
// cluster barriers. Addresses are shared-memory addresses (shared_address). Source: PTX ISA, "mbarrier".
#pragma once
#include <stdint.h>

namespace castiron {

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine and to the other CTAs of the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the barrier of the same address in CTA `rank` of the cluster. Without cluster scope, whose fence
// would stall a main loop: it orders no ordinary writes, only says that a slot has been read (by finished
// wgmmas).
__device__ __forceinline__ void mbarrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
// Arrives, and the phase also waits for `bytes` to be written by copies.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// Waits until the phase of this parity has completed. try_wait suspends the thread for a while by itself.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done = 0;
    while (!done) {
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    }
}
// Barrier of `threads` threads (whole warps) of the CTA; barrier 0 is __syncthreads'.
__device__ __forceinline__ void named_barrier(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Barrier of all threads of the cluster, by whole converged warps, without ordering memory (which would stall
// until every store of the multiprocessor has arrived): all threads have come this far.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_barrier_relaxed() {
    cluster_arrive_relaxed();
    cluster_wait();
}
// The same place of shared memory in CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}
// Stores into shared memory of the cluster that count their bytes at a barrier of the same CTA, as copies do:
// whoever waits for it sees them. Both addresses as cluster_address gives them.
__device__ __forceinline__ void store_async(uint32_t to, float a, float b, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
        "f"(a), "f"(b), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void store_async(uint32_t to, float4 v, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::
            "r"(to),
        "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
        : "memory");
}

// Registers per thread of this warpgroup from here on; all its warps execute it.
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace castiron
