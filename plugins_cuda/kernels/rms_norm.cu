// RMS norm (Zhang and Sennrich, "Root mean square layer normalization", 2019), alone and after adding to the
// residual stream. ROW_THREADS threads do a row, THREADS / ROW_THREADS rows are a CTA's at a time. A row of
// up to ROW_THREADS * CHUNKS * 8 elements, a multiple of 8, stays in registers; other dims, and rows that
// aren't aligned to 16 bytes, are read twice, element by element. CHUNKS=0: only that. OUT_FP8=1: what is
// normed isn't rounded to bf16 but quantized to float8, for which other dims are read once more.
#if OUT_FP8
#include "fp8_row.cuh"
#else
#include "row_access.cuh"
#endif

#ifndef THREADS
#define THREADS 256
#define ROW_THREADS 256
#define CHUNKS 2
#endif

namespace castiron {
namespace {

constexpr int kThreads = THREADS, kRowThreads = ROW_THREADS, kRows = kThreads / kRowThreads;
constexpr int kChunks = CHUNKS, kWarps = kThreads / 32;
static_assert(kRowThreads == 32 || kRows == 1, "a row is a warp's or a CTA's");

#if OUT_FP8
using Norm = RmsNormFp8Params;
using AddNorm = AddRmsNormFp8Params;
__device__ __forceinline__ bool output_aligned(const uint8_t *y, int64_t stride) {
    return codes_aligned(y, stride);
}
#else
using Norm = RmsNormParams;
using AddNorm = AddRmsNormParams;
__device__ __forceinline__ bool output_aligned(const bf16 *y, int64_t stride) {
    return rows_aligned(y, stride);
}
#endif

__device__ __forceinline__ bool all_aligned(const Norm &p) {
    return rows_aligned(p.x, p.x_stride) && output_aligned(p.y, p.y_stride) && rows_aligned(p.weight, 0);
}
__device__ __forceinline__ bool all_aligned(const AddNorm &p) {
    return rows_aligned(p.x, p.x_stride) && rows_aligned(p.residual, p.residual_stride) &&
           output_aligned(p.y, p.y_stride) && rows_aligned(p.residual_out, p.residual_out_stride) &&
           rows_aligned(p.weight, 0);
}

// What is normalized. add_rms_norm leaves it in residual_out, which may be the residual itself: each element
// is written by the thread that read it, and a row's loads all come before its stores, so that they overlap.
__device__ __forceinline__ Eight load_input(const Norm &p, int64_t row, int column) {
    return load_eight(p.x + row * p.x_stride + column);
}
__device__ __forceinline__ Eight load_input(const AddNorm &p, int64_t row, int column) {
    const Eight x = load_eight(p.x + row * p.x_stride + column);
    Eight sum = load_eight(p.residual + row * p.residual_stride + column);
#pragma unroll
    for (int i = 0; i < kEight; ++i) sum.v[i] += x.v[i];
    return sum;
}
__device__ __forceinline__ void keep_input(const Norm &, int64_t, int, const Eight &) {}
__device__ __forceinline__ void keep_input(const AddNorm &p, int64_t row, int column, const Eight &x) {
    store_eight(p.residual_out + row * p.residual_out_stride + column, x);
}
__device__ __forceinline__ float load_one(const Norm &p, int64_t row, int column) {
    return p.x[row * p.x_stride + column];
}
__device__ __forceinline__ float load_one(const AddNorm &p, int64_t row, int column) {
    const float sum = p.residual[row * p.residual_stride + column] + to_float(p.x[row * p.x_stride + column]);
    p.residual_out[row * p.residual_out_stride + column] = sum;
    return sum;
}
// The same once more, by the thread that loaded it.
__device__ __forceinline__ float load_again(const Norm &p, int64_t row, int column) {
    return p.x[row * p.x_stride + column];
}
__device__ __forceinline__ float load_again(const AddNorm &p, int64_t row, int column) {
    return p.residual_out[row * p.residual_out_stride + column];
}

// Sum over the threads of a row, the same in all of them. `sums` is written in turn, so one barrier will do:
// nobody is two rows ahead of another.
__device__ __forceinline__ float row_sum(float sum, float (*sums)[kWarps], int turn) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if constexpr (kRowThreads > 32) {
        if (threadIdx.x % 32 == 0) sums[turn & 1][threadIdx.x / 32] = sum;
        __syncthreads();
        sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) sum += sums[turn & 1][warp];
    }
    return sum;
}

#if OUT_FP8
// The scale that a row is quantized with, from the largest magnitude a thread has of it; left in p.scale too.
template <typename Params>
__device__ __forceinline__ float row_scale(const Params &p, int64_t row, uint32_t largest,
                                           uint32_t (*maxima)[kWarps], int turn) {
    float scale = p.input_scale;
    if (scale == 0.0f) {
        largest = __reduce_max_sync(~0u, largest);
        if constexpr (kRowThreads > 32) {
            if (threadIdx.x % 32 == 0) maxima[turn & 1][threadIdx.x / 32] = largest;
            __syncthreads();
            largest = 0;
#pragma unroll
            for (int warp = 0; warp < kWarps; ++warp) largest = max(largest, maxima[turn & 1][warp]);
        }
        scale = scale_of(largest);
    }
    if (threadIdx.x % kRowThreads == 0) p.scale[row] = scale;
    return scale;
}
#endif

template <typename Params>
__device__ __forceinline__ void norm_in_registers(const Params &p) {
    constexpr int kHeld = kChunks > 0 ? kChunks : 1;
    __shared__ float sums[2][kWarps];
#if OUT_FP8
    __shared__ uint32_t maxima[2][kWarps];
#endif
    const int thread = threadIdx.x % kRowThreads;
    Eight weight[kHeld];
#pragma unroll
    for (int c = 0; c < kHeld; ++c) {
        const int column = (thread + c * kRowThreads) * kEight;
        if (column < p.dim) weight[c] = load_eight(p.weight + column);
    }
    const int num_rows = p.header[p.count];
    let_next_start();
    wait_for_inputs();
    int turn = 0;
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kRowThreads; row < num_rows;
         row += static_cast<int64_t>(gridDim.x) * kRows) {
        Eight x[kHeld];
        float sum = 0.0f;
#if OUT_FP8
        uint32_t largest = 0;
#endif
#pragma unroll
        for (int c = 0; c < kHeld; ++c) {
            const int column = (thread + c * kRowThreads) * kEight;
            if (column < p.dim) x[c] = load_input(p, row, column);
        }
#pragma unroll
        for (int c = 0; c < kHeld; ++c) {
            const int column = (thread + c * kRowThreads) * kEight;
            if (column >= p.dim) continue;
            keep_input(p, row, column, x[c]);
#pragma unroll
            for (int i = 0; i < kEight; ++i) sum += x[c].v[i] * x[c].v[i];
        }
        const float scale = rsqrtf(row_sum(sum, sums, turn++) / static_cast<float>(p.dim) + p.eps);
#pragma unroll
        for (int c = 0; c < kHeld; ++c) {
            const int column = (thread + c * kRowThreads) * kEight;
            if (column >= p.dim) continue;
#pragma unroll
            for (int i = 0; i < kEight; ++i) x[c].v[i] = x[c].v[i] * scale * weight[c].v[i];
#if OUT_FP8
            largest = max(largest, largest_magnitude(x[c]));
#else
            store_eight(p.y + row * p.y_stride + column, x[c]);
#endif
        }
#if OUT_FP8
        const ByScale by(row_scale(p, row, largest, maxima, turn));
#pragma unroll
        for (int c = 0; c < kHeld; ++c) {
            const int column = (thread + c * kRowThreads) * kEight;
            if (column < p.dim) quantize_eight(p.y + row * p.y_stride + column, x[c], by);
        }
#endif
    }
}

template <typename Params>
__device__ __forceinline__ void norm_by_elements(const Params &p) {
    __shared__ float sums[2][kWarps];
#if OUT_FP8
    __shared__ uint32_t maxima[2][kWarps];
#endif
    const int thread = threadIdx.x % kRowThreads;
    const int num_rows = p.header[p.count];
    let_next_start();
    wait_for_inputs();
    int turn = 0;
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kRowThreads; row < num_rows;
         row += static_cast<int64_t>(gridDim.x) * kRows) {
        float sum = 0.0f;
        for (int column = thread; column < p.dim; column += kRowThreads) {
            const float x = load_one(p, row, column);
            sum += x * x;
        }
        const float scale = rsqrtf(row_sum(sum, sums, turn++) / static_cast<float>(p.dim) + p.eps);
        const auto normed = [&](int column) { return load_again(p, row, column) * scale * p.weight[column]; };
#if OUT_FP8
        uint32_t largest = 0;
        if (p.input_scale == 0.0f) {
            for (int column = thread; column < p.dim; column += kRowThreads)
                largest = max(largest, magnitude(normed(column)));
        }
        const ByScale by(row_scale(p, row, largest, maxima, turn));
        for (int column = thread; column < p.dim; column += kRowThreads)
            quantize_one(p.y + row * p.y_stride + column, normed(column), by);
#else
        for (int column = thread; column < p.dim; column += kRowThreads)
            p.y[row * p.y_stride + column] = __float2bfloat16_rn(normed(column));
#endif
    }
}

template <typename Params>
__device__ __forceinline__ void norm_rows(const Params &p) {
    if (kChunks > 0 && all_aligned(p)) {
        norm_in_registers(p);
    } else {
        norm_by_elements(p);
    }
}

}  // namespace

#if OUT_FP8
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm_fp8(const __grid_constant__ RmsNormFp8Params p) {
    norm_rows(p);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    add_rms_norm_fp8(const __grid_constant__ AddRmsNormFp8Params p) {
    norm_rows(p);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(const __grid_constant__ RmsNormParams p) {
    norm_rows(p);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    add_rms_norm(const __grid_constant__ AddRmsNormParams p) {
    norm_rows(p);
}
#endif

}  // namespace castiron
