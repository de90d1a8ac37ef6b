// linear.q*: quantized weights with f32 activations; the weights' exact values are multiplied.
#include "linear_f32.h"

namespace castiron {
namespace {

template <typename Scheme>
struct Dequantized {
    static constexpr bool kReads = false;
    static int64_t panel_bytes(int64_t k) { return Scheme::panel_bytes(k); }
    static const float *piece(const uint8_t *panel, int64_t k_begin, int64_t num_k, float *scratch) {
        static_assert(kPieceK % kPlaneK == 0);
        for (int64_t k = 0; k < num_k; k += kPlaneK)
            dequantize_plane<Scheme>(panel, (k_begin + k) / kPlaneK, scratch + k * kPanelRows);
        return scratch;
    }
};

}  // namespace

CASTIRON_KERNEL("linear.q4_0", LinearParams, linear_f32<Dequantized<Q4_0>>);
CASTIRON_KERNEL("linear.q4_1", LinearParams, linear_f32<Dequantized<Q4_1>>);
CASTIRON_KERNEL("linear.q5_0", LinearParams, linear_f32<Dequantized<Q5_0>>);
CASTIRON_KERNEL("linear.q5_1", LinearParams, linear_f32<Dequantized<Q5_1>>);
CASTIRON_KERNEL("linear.q8_0", LinearParams, linear_f32<Dequantized<Q8_0>>);
CASTIRON_KERNEL("linear.q4_k", LinearParams, linear_f32<Dequantized<Q4_K>>);
CASTIRON_KERNEL("linear.q5_k", LinearParams, linear_f32<Dequantized<Q5_K>>);
CASTIRON_KERNEL("linear.q6_k", LinearParams, linear_f32<Dequantized<Q6_K>>);

}  // namespace castiron
