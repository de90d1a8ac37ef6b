// linear.f32, linear.f16, linear.bf16
#include "linear_f32.h"

namespace castiron {
namespace {

struct F32Weights {
    static int64_t panel_bytes(int64_t k) { return k * kPanelRows * 4; }
    static const float *piece(const uint8_t *panel, int64_t k_begin, int64_t, float *) {
        return reinterpret_cast<const float *>(panel) + k_begin * kPanelRows;
    }
};

struct F16Weights {
    static int64_t panel_bytes(int64_t k) { return k * kPanelRows * 2; }
    static const float *piece(const uint8_t *panel, int64_t k_begin, int64_t num_k, float *scratch) {
        const auto *halves = reinterpret_cast<const uint16_t *>(panel) + k_begin * kPanelRows;
        for (int64_t k = 0; k < num_k; k++)
            F32x16::load_f16(halves + k * kPanelRows).store(scratch + k * kPanelRows);
        return scratch;
    }
};

struct Bf16Weights {  // pairs of k: the even one in the low half of 32 bits
    static int64_t panel_bytes(int64_t k) { return (k + 1) / 2 * kPanelRows * 4; }
    static const float *piece(const uint8_t *panel, int64_t k_begin, int64_t num_k, float *scratch) {
        static_assert(kPieceK % 2 == 0);
        const auto *pairs = reinterpret_cast<const uint32_t *>(panel) + k_begin / 2 * kPanelRows;
        for (int64_t k = 0; k < num_k; k += 2) {
            for (int r = 0; r < kPanelRows; r++) {
                const uint32_t pair = pairs[k / 2 * kPanelRows + r];
                scratch[k * kPanelRows + r] = f32_from_bits(pair << 16);
                scratch[(k + 1) * kPanelRows + r] = f32_from_bits(pair & 0xffff0000u);
            }
        }
        return scratch;
    }
};

}  // namespace

CASTIRON_KERNEL("linear.f32", LinearParams, linear_f32<F32Weights>);
CASTIRON_KERNEL("linear.f16", LinearParams, linear_f32<F16Weights>);
CASTIRON_KERNEL("linear.bf16", LinearParams, linear_f32<Bf16Weights>);

}  // namespace castiron
