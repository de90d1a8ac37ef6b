// Activations to float8, for linears of fp8 weights.
#include "fp8_rows.cuh"

namespace castiron {

extern "C" __global__ void __launch_bounds__(512, kHeld < 4 ? 2 : 1)
    quantize_fp8(const __grid_constant__ QuantizeFp8Params p) {
    quantize_rows(
        p, rows_aligned(p.x, p.x_stride),
        [&](int64_t row, int column) { return load_words(p.x + row * p.x_stride + column); }, eight_of,
        [&](int64_t row, int column) { return to_float(p.x[row * p.x_stride + column]); });
}

}  // namespace castiron
