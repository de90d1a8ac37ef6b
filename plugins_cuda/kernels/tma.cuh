// Bulk copies from global to shared memory by the copy engine, completing on an mbarrier of this CTA. One
// thread issues a copy. Source: PTX ISA, "cp.async.bulk" and "cp.async.bulk.tensor".
#pragma once
#include "abi.cuh"

namespace castiron {

__device__ __forceinline__ void prefetch_map(const TensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// `bytes` contiguous bytes; both addresses and the size are multiples of 16.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
        : "memory");
}
// The box of a 2-D tensor map whose first element is (column, row); what lies outside the matrix arrives as
// zero.
__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap *map, int column, int row,
                                         uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}
// The same into the CTAs of the cluster whose bit is set, at the same address in each, completing on the
// barrier at the same address in each.
__device__ __forceinline__ void copy_box_multicast(uint32_t to, const TensorMap *map, int column, int row,
                                                   uint32_t barrier, uint16_t ctas) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(ctas)
        : "memory");
}

}  // namespace castiron
