// embedding.*: rows of a packed table as f32. A token id below 0 stands for last_token[-1 - id]. An id
// outside the vocabulary or one that stands for no row gives zeros, never a read outside the table or rows.
#include "../abi.h"
#include "registry.h"
#include "scheme_blocks.h"

namespace castiron {
namespace {

template <void (*read_row)(const uint8_t *panel, int lane, int64_t dim, float *y),
          int64_t (*panel_bytes)(int64_t)>
void embedding(const EmbeddingParams &p, const Context &context) {
    const Range rows = share(live_count(p.count, context), context);
    const auto *table = static_cast<const uint8_t *>(p.table);
    for (int64_t row = rows.begin; row < rows.end; row++) {
        int64_t id = p.token_ids[row];
        if (id < 0) id = -1 - id < p.max_rows ? p.last_token[-1 - id] : p.vocab;
        float *y = p.y + row * p.y_stride;
        if (id < 0 || id >= p.vocab) {
            for (int64_t i = 0; i < p.dim; i++) y[i] = 0.0f;
            continue;
        }
        read_row(table + id / kPanelRows * panel_bytes(p.dim), static_cast<int>(id % kPanelRows), p.dim, y);
    }
}

int64_t panel_bytes_f32(int64_t dim) { return dim * kPanelRows * 4; }
void read_f32(const uint8_t *panel, int lane, int64_t dim, float *y) {
    const auto *values = reinterpret_cast<const float *>(panel) + lane;
    for (int64_t i = 0; i < dim; i++) y[i] = values[i * kPanelRows];
}

int64_t panel_bytes_f16(int64_t dim) { return dim * kPanelRows * 2; }
void read_f16(const uint8_t *panel, int lane, int64_t dim, float *y) {
    const auto *values = reinterpret_cast<const uint16_t *>(panel) + lane;
    for (int64_t i = 0; i < dim; i++) y[i] = f32_from_f16(values[i * kPanelRows]);
}

int64_t panel_bytes_bf16(int64_t dim) { return (dim + 1) / 2 * kPanelRows * 4; }
void read_bf16(const uint8_t *panel, int lane, int64_t dim, float *y) {
    const auto *values = reinterpret_cast<const uint16_t *>(panel) + lane * 2;
    for (int64_t i = 0; i < dim; i++) y[i] = f32_from_bf16(values[i / 2 * kPanelRows * 2 + i % 2]);
}

// The code of element k (of 32) in a lane.
template <int bits>
int read_code(const uint8_t *planes, int lane, int k) {
    const int group = k / 4, byte = lane * 4 + k % 4;
    if constexpr (bits == 8) return static_cast<int8_t>(planes[group * kGroupBytes + byte]);
    const int nibbles = planes[group % 4 * kGroupBytes + byte];
    const uint8_t *high = planes + 4 * kGroupBytes;
    int code = group < 4 ? nibbles & 15 : nibbles >> 4;
    if constexpr (bits == 5) code |= (high[byte] >> group & 1) << 4;
    if constexpr (bits == 6) code |= (high[group / 4 * kGroupBytes + byte] >> group % 4 * 2 & 3) << 4;
    return code;
}

template <typename Scheme>
void read_quantized(const uint8_t *panel, int lane, int64_t dim, float *y) {
    constexpr int kGroupK = kPlaneK / kScaleGroups<Scheme::kBits>;
    for (int64_t plane = 0; plane < dim / kPlaneK; plane++) {
        const uint8_t *planes = Scheme::codes(panel, plane);
        for (int group = 0; group < kScaleGroups<Scheme::kBits>; group++) {
            float scales[kPanelRows], minimums[kPanelRows];
            const Scales s = Scheme::plane_scales(panel, plane, group);
            s.scale.store(scales);
            s.minimum.store(minimums);
            const float scale = scales[lane], minimum = Scheme::kHasMinimum ? minimums[lane] : 0.0f;
            for (int k = group * kGroupK; k < (group + 1) * kGroupK; k++)
                y[plane * kPlaneK + k] =
                    static_cast<float>(read_code<Scheme::kBits>(planes, lane, k)) * scale + minimum;
        }
    }
}

template <typename Scheme>
void embedding_quantized(const EmbeddingParams &p, const Context &context) {
    embedding<read_quantized<Scheme>, Scheme::panel_bytes>(p, context);
}

}  // namespace

CASTIRON_KERNEL("embedding.f32", EmbeddingParams, embedding<read_f32, panel_bytes_f32>);
CASTIRON_KERNEL("embedding.f16", EmbeddingParams, embedding<read_f16, panel_bytes_f16>);
CASTIRON_KERNEL("embedding.bf16", EmbeddingParams, embedding<read_bf16, panel_bytes_bf16>);
CASTIRON_KERNEL("embedding.q4_0", EmbeddingParams, embedding_quantized<Q4_0>);
CASTIRON_KERNEL("embedding.q4_1", EmbeddingParams, embedding_quantized<Q4_1>);
CASTIRON_KERNEL("embedding.q5_0", EmbeddingParams, embedding_quantized<Q5_0>);
CASTIRON_KERNEL("embedding.q5_1", EmbeddingParams, embedding_quantized<Q5_1>);
CASTIRON_KERNEL("embedding.q8_0", EmbeddingParams, embedding_quantized<Q8_0>);
CASTIRON_KERNEL("embedding.q4_k", EmbeddingParams, embedding_quantized<Q4_K>);
CASTIRON_KERNEL("embedding.q5_k", EmbeddingParams, embedding_quantized<Q5_K>);
CASTIRON_KERNEL("embedding.q6_k", EmbeddingParams, embedding_quantized<Q6_K>);

}  // namespace castiron
