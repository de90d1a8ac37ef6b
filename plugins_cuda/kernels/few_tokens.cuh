// PTX that linear_few is made of, beside barriers and bulk copies: asynchronous copies, mma, stores.
#pragma once
#include "abi.cuh"
#include "kernels/mbarrier.cuh"
#include "kernels/tma.cuh"

namespace castiron {

// 16 bytes, or zeros without reading.
__device__ __forceinline__ void copy_16_async(uint32_t to, const void *from, bool is_live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(is_live ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_async() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of bf16: lane 8m + r gives the address of row r of matrix m (16 bytes).
__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t matrices[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t address, uint32_t matrices[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}

// d = a . b + c, m16 n8 k16.
// d += a . b of e4m3, 16 x 32 . 32 x 8. sm_90 makes f16 of the bytes, exactly, before it multiplies.
__device__ __forceinline__ void mma_e4m3(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
}

// values[0..count - 1], count 1..4, in one store where address and count allow it.
__device__ __forceinline__ void write_4(float *to, const float values[4], int count) {
    if (count == 4 && (reinterpret_cast<uint64_t>(to) & 15) == 0) {
        *reinterpret_cast<float4 *>(to) = make_float4(values[0], values[1], values[2], values[3]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i < count) to[i] = values[i];
        }
    }
}
__device__ __forceinline__ void write_4(bf16 *to, const float values[4], int count) {
    if (count == 4 && (reinterpret_cast<uint64_t>(to) & 7) == 0) {
        const __nv_bfloat162 low = __floats2bfloat162_rn(values[0], values[1]);
        const __nv_bfloat162 high = __floats2bfloat162_rn(values[2], values[3]);
        *reinterpret_cast<uint2 *>(to) =
            make_uint2(*reinterpret_cast<const uint32_t *>(&low), *reinterpret_cast<const uint32_t *>(&high));
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i < count) to[i] = __float2bfloat16_rn(values[i]);
        }
    }
}

}  // namespace castiron
