// linear.f32, linear.f16, linear.bf16
#include "linear_f32.h"

namespace castiron {
namespace {

struct F32Weights {
    static constexpr bool kReads = true;
    struct Reader {
        static constexpr int kStep = 1;
        static void load(const void *weight, int64_t k, F32x16 *out) {
            const float *values = static_cast<const float *>(weight) + k * kPanelRows;
            prefetch(reinterpret_cast<const char *>(values) + kPrefetchF32Bytes);
            out[0] = F32x16::load(values);
        }
    };
    static int64_t panel_bytes(int64_t k) { return k * kPanelRows * 4; }
    static const float *packed(const uint8_t *panel, int64_t k_begin) {
        return reinterpret_cast<const float *>(panel) + k_begin * kPanelRows;
    }
    static const float *piece(const uint8_t *panel, int64_t k_begin, int64_t, float *) {
        return packed(panel, k_begin);
    }
};

// A piece in f32, by the reader of the packed form.
template <typename Reader>
const float *convert_piece(const void *weight, int64_t num_k, float *scratch) {
    static_assert(kPieceK % Reader::kStep == 0);
    for (int64_t k = 0; k < num_k; k += Reader::kStep) {
        F32x16 weights[Reader::kStep];
        Reader::load(weight, k, weights);
        for (int step = 0; step < Reader::kStep; step++)
            weights[step].store(scratch + (k + step) * kPanelRows);
    }
    return scratch;
}

struct F16Weights {
    static constexpr bool kReads = true;
    struct Reader {
        static constexpr int kStep = 1;
        static void load(const void *weight, int64_t k, F32x16 *out) {
            const uint16_t *halves = static_cast<const uint16_t *>(weight) + k * kPanelRows;
            prefetch(reinterpret_cast<const char *>(halves) + kPrefetchF32Bytes);
            out[0] = F32x16::load_f16(halves);
        }
    };
    static int64_t panel_bytes(int64_t k) { return k * kPanelRows * 2; }
    static const uint16_t *packed(const uint8_t *panel, int64_t k_begin) {
        return reinterpret_cast<const uint16_t *>(panel) + k_begin * kPanelRows;
    }
    static const float *piece(const uint8_t *panel, int64_t k_begin, int64_t num_k, float *scratch) {
        return convert_piece<Reader>(packed(panel, k_begin), num_k, scratch);
    }
};

struct Bf16Weights {  // pairs of k, an odd last one padded
    static constexpr bool kReads = true;
    struct Reader {
        static constexpr int kStep = 2;
        static void load(const void *weight, int64_t k, F32x16 *out) {
            const uint32_t *pairs = static_cast<const uint32_t *>(weight) + k / 2 * kPanelRows;
            prefetch(reinterpret_cast<const char *>(pairs) + kPrefetchF32Bytes);
            load_bf16_pairs(pairs, &out[0], &out[1]);
        }
    };
    static int64_t panel_bytes(int64_t k) { return (k + 1) / 2 * kPanelRows * 4; }
    static const uint32_t *packed(const uint8_t *panel, int64_t k_begin) {
        return reinterpret_cast<const uint32_t *>(panel) + k_begin / 2 * kPanelRows;
    }
    static const float *piece(const uint8_t *panel, int64_t k_begin, int64_t num_k, float *scratch) {
        return convert_piece<Reader>(packed(panel, k_begin), num_k, scratch);
    }
};

}  // namespace

CASTIRON_KERNEL("linear.f32", LinearParams, linear_f32<F32Weights>);
CASTIRON_KERNEL("linear.f16", LinearParams, linear_f32<F16Weights>);
CASTIRON_KERNEL("linear.bf16", LinearParams, linear_f32<Bf16Weights>);

}  // namespace castiron
