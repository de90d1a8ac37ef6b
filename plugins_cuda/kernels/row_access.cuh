// Rows of bf16 and f32 matrices, eight elements at a time where rows are aligned to 16 bytes.
#pragma once
#include "abi.cuh"

namespace castiron {

constexpr int kEight = 8;

struct Eight {
    float v[kEight];
};

// Whether every row of this matrix starts at a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ bool rows_aligned(const T *base, int64_t stride) {
    return ((reinterpret_cast<uint64_t>(base) | static_cast<uint64_t>(stride) * sizeof(T)) & 15) == 0;
}

__device__ __forceinline__ Eight load_eight(const float *from) {
    const float4 a = *reinterpret_cast<const float4 *>(from);
    const float4 b = *reinterpret_cast<const float4 *>(from + 4);
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ __forceinline__ Eight load_eight(const bf16 *from) {
    const uint4 words = *reinterpret_cast<const uint4 *>(from);
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
    Eight x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // a bf16 is the upper half of a float
        x.v[2 * i] = __uint_as_float(w[i] << 16);
        x.v[2 * i + 1] = __uint_as_float(w[i] & 0xFFFF0000u);
    }
    return x;
}

__device__ __forceinline__ void store_eight(float *to, const Eight &x) {
    *reinterpret_cast<float4 *>(to) = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
    *reinterpret_cast<float4 *>(to + 4) = make_float4(x.v[4], x.v[5], x.v[6], x.v[7]);
}

__device__ __forceinline__ void store_eight(bf16 *to, const Eight &x) {
    __nv_bfloat162 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(x.v[2 * i], x.v[2 * i + 1]);
    *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(pairs);
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }

// Calls eight(row, column) for groups of eight columns and one(row, column) for single ones, over the live
// rows of a grid (CTAs along a row, rows): all columns of all rows, each once. `aligned`: every operand's
// rows are.
template <typename EightColumns, typename OneColumn>
__device__ __forceinline__ void for_elements(int num_rows, int dim, bool aligned, EightColumns eight,
                                             OneColumn one) {
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    const int wide = aligned ? dim / kEight : 0;
    for (int64_t row = blockIdx.y; row < num_rows; row += gridDim.y) {
        for (int i = thread; i < wide; i += threads) eight(row, i * kEight);
        for (int column = wide * kEight + thread; column < dim; column += threads) one(row, column);
    }
}

}  // namespace castiron
