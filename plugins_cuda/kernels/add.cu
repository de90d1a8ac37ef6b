// y = a + b: the residual stream (f32) plus a layer's output (bf16). y may be a.
#include "row_access.cuh"

namespace castiron {

extern "C" __global__ void __launch_bounds__(256) add(const __grid_constant__ AddParams p) {
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
            for (int i = 0; i < kEight; ++i) a.v[i] += b.v[i];
            store_eight(p.y + row * p.y_stride + column, a);
        },
        [&](int64_t row, int column) {
            p.y[row * p.y_stride + column] =
                p.a[row * p.a_stride + column] + to_float(p.b[row * p.b_stride + column]);
        });
}

}  // namespace castiron
