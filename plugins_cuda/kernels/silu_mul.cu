// y = silu(a) * b, in f32, rounded once: to bf16, or to float8 (OUT_FP8=1). a and b are usually the halves of
// one gate-up row.
#if OUT_FP8
#include "fp8_rows.cuh"
#else
#include "row_access.cuh"
#endif

namespace castiron {
namespace {

// e^-a overflows to infinity for very negative a, which gives the limit, zero.
__device__ __forceinline__ float silu_times(float a, float b) { return __fdividef(a, 1.0f + __expf(-a)) * b; }

#if OUT_FP8
struct Loaded {  // of eight columns
    uint4 a, b;
};
using Params = SiluMulFp8Params;
#else
using Params = SiluMulParams;
#endif

__device__ __forceinline__ Eight silu_times(Eight a, const Eight &b) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) a.v[i] = silu_times(a.v[i], b.v[i]);
    return a;
}

__device__ __forceinline__ float one_value(const Params &p, int64_t row, int column) {
    return silu_times(to_float(p.a[row * p.a_stride + column]), to_float(p.b[row * p.b_stride + column]));
}

}  // namespace

#if OUT_FP8
extern "C" __global__ void __launch_bounds__(512, kHeld < 4 ? 2 : 1)
    silu_mul_fp8(const __grid_constant__ SiluMulFp8Params p) {
    quantize_rows(
        p, rows_aligned(p.a, p.a_stride) && rows_aligned(p.b, p.b_stride),
        [&](int64_t row, int column) {
            return Loaded{load_words(p.a + row * p.a_stride + column),
                          load_words(p.b + row * p.b_stride + column)};
        },
        [&](const Loaded &x) { return silu_times(eight_of(x.a), eight_of(x.b)); },
        [&](int64_t row, int column) { return one_value(p, row, column); });
}
#else
extern "C" __global__ void __launch_bounds__(256) silu_mul(const __grid_constant__ SiluMulParams p) {
    const int num_rows = p.header[p.count];
    const bool aligned =
        rows_aligned(p.a, p.a_stride) && rows_aligned(p.b, p.b_stride) && rows_aligned(p.y, p.y_stride);
    let_next_start();
    wait_for_inputs();
    for_elements(
        num_rows, p.dim, aligned,
        [&](int64_t row, int column) {
            const Eight a = load_eight(p.a + row * p.a_stride + column);
            const Eight b = load_eight(p.b + row * p.b_stride + column);
            store_eight(p.y + row * p.y_stride + column, silu_times(a, b));
        },
        [&](int64_t row, int column) {
            p.y[row * p.y_stride + column] = __float2bfloat16_rn(one_value(p, row, column));
        });
}
#endif

}  // namespace castiron
