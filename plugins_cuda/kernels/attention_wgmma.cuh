// The two matrix products of attention as warpgroup multiplies: A (queries; softmax weights) in registers, B
// (keys; values) in shared memory as panels of 64 columns: rows (kv tokens) of 128 bytes, chunk c of row r at
// c ^ (r & 7). For q . k^T that is the K-major image of wgmma.cuh. For weights . v the reduction runs over
// the rows, so B is MN-major: 8 rows are one swizzle atom (1024 bytes), the stride offset is the step to the
// next 8 rows, the leading offset the step to the next panel. Source: PTX ISA, "Asynchronous Warpgroup Level
// Matrix Shared Memory Layout".
#pragma once
#include "wgmma.cuh"

namespace castiron {

__device__ __forceinline__ uint64_t transposed_descriptor(uint32_t address, uint32_t panel_bytes) {
    return swizzled_descriptor(address) & ~(uint64_t(0x3FFF) << 16) | uint64_t(panel_bytes >> 4) << 16;
}

// Keeps the compiler from using registers before the wait that stands before this.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Keeps the operands of multiplies in their registers up to here.
template <int kRows>
__device__ __forceinline__ void pin(uint32_t (&a)[kRows][4]) {
#pragma unroll
    for (int i = 0; i < kRows * 4; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)

// d[64 rows, 64 or 128] += a[64 rows, 16 k] . b[16 k, 64 or 128], b MN-major.
// clang-format off
__device__ __forceinline__ void wgmma_transposed(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : D16(0), D16(16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_transposed(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
        : D16(0), D16(16), D16(32), D16(48) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// clang-format on

#undef D4
#undef D16

}  // namespace castiron
