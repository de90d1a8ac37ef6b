// y = silu(a) * b, in f32, rounded once. a and b are usually the halves of one gate-up row.
#include "row_access.cuh"

namespace castiron {
namespace {

// e^-a overflows to infinity for very negative a, which gives the limit, zero.
__device__ __forceinline__ float silu_times(float a, float b) { return __fdividef(a, 1.0f + __expf(-a)) * b; }

}  // namespace

extern "C" __global__ void __launch_bounds__(256) silu_mul(const __grid_constant__ SiluMulParams p) {
    const int num_rows = p.header[p.count];
    const bool aligned =
        rows_aligned(p.a, p.a_stride) && rows_aligned(p.b, p.b_stride) && rows_aligned(p.y, p.y_stride);
    let_next_start();
    wait_for_inputs();
    for_elements(
        num_rows, p.dim, aligned,
        [&](int64_t row, int column) {
            Eight a = load_eight(p.a + row * p.a_stride + column);
            const Eight b = load_eight(p.b + row * p.b_stride + column);
#pragma unroll
            for (int i = 0; i < kEight; ++i) a.v[i] = silu_times(a.v[i], b.v[i]);
            store_eight(p.y + row * p.y_stride + column, a);
        },
        [&](int64_t row, int column) {
            const float a = to_float(p.a[row * p.a_stride + column]);
            const float b = to_float(p.b[row * p.b_stride + column]);
            p.y[row * p.y_stride + column] = __float2bfloat16_rn(silu_times(a, b));
        });
}

}  // namespace castiron
