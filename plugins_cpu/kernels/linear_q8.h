// y = x . weight^T with activations quantized to two int8 digits (a scale per 32) and quantized weights: dot
// products of integers, exact, and per scale group three f32 operations a y element (combine_digits,
// add_group):
//     y += minimum * sum(x of the group);  y += (x's scale * weight's scale) * dot
// in the order of k, whatever the tile, the path, the thread or the piece of k (partial sums pass through y).
//
// Few rows read the packed panel directly. Many rows expand a panel once and use it for all of them.
#pragma once
#include "../abi.h"
#include "linear_q8_amx.h"
#include "linear_q8_tile.h"
#include "registry.h"

namespace castiron {

constexpr int64_t kPieceQ8 = 4096;            // k expanded at a time, a multiple of every scheme's block
constexpr int64_t kBlockBytesQ8 = 256 << 10;  // of activations, to stay in the L2 cache
constexpr int64_t kMaxBlockRowsQ8 = 512;
constexpr int64_t kFewRows = 8;  // below it, expanding a panel isn't worth it

template <typename Scheme>
void expand_panel(const uint8_t *panel, int64_t first_plane, int64_t num_planes,
                  ExpandedPlane<Scheme::kBits> *out) {
    for (int64_t i = 0; i < num_planes; i++) {
        const int64_t plane = first_plane + i;
        expand_q8_codes<Scheme::kBits>(Scheme::codes(panel, plane), out[i].codes);
        for (int group = 0; group < kScaleGroups<Scheme::kBits>; group++) {
            const Scales scales = Scheme::plane_scales(panel, plane, group);
            scales.scale.store(out[i].scale[group]);
            scales.minimum.store(out[i].minimum[group]);
        }
    }
}

// Sums of the q of each 32 k: int32 [rows][num_planes]; the digits of an activation count as rows.
inline void sum_q8(const int8_t *q, int64_t k, int64_t num_rows, int64_t num_planes, int32_t *out) {
    for (int64_t row = 0; row < num_rows; row++) {
        for (int64_t plane = 0; plane < num_planes; plane++) {
            int32_t sum = 0;
            for (int i = 0; i < kPlaneK; i++) sum += q[row * k + plane * kPlaneK + i];
            out[row * num_planes + plane] = sum;
        }
    }
}

template <typename Scheme>
void linear_q8(const LinearQ8Params &p, const Context &context) {
    constexpr int kBits = Scheme::kBits;
    constexpr int64_t kExpandedBytes = kPieceQ8 / kPlaneK * sizeof(ExpandedPlane<kBits>);
    static_assert(kPieceQ8 % Scheme::kBlockK == 0);
    static_assert(kExpandedBytes + kBlockBytesQ8 / kPlaneK * sizeof(int32_t) <= kScratchBytes);
    auto *expanded = reinterpret_cast<ExpandedPlane<kBits> *>(context.scratch);
    auto *q_sums = reinterpret_cast<int32_t *>(context.scratch + kExpandedBytes);

    const int64_t num_rows = live_count(p.count, context);
    const Range panels = share((p.n + kPanelRows - 1) / kPanelRows, context);
    const auto *weight = static_cast<const uint8_t *>(p.weight);
    const int64_t piece = p.k < kPieceQ8 ? p.k : kPieceQ8;
    const int64_t fitting_rows = kBlockBytesQ8 / (kDigits * piece) / 16 * 16;  // at least 32
    const int64_t block_rows = fitting_rows < kMaxBlockRowsQ8 ? fitting_rows : kMaxBlockRowsQ8;
    if (panels.begin == panels.end) return;
#if defined(__AMX_INT8__)
    if (num_rows >= kAmxRows) load_tile_config<kBits>();
#endif
    for (int64_t row = 0; row < num_rows; row += block_rows) {
        const int64_t rows = num_rows - row < block_rows ? num_rows - row : block_rows;
        for (int64_t k = 0; k < p.k; k += piece) {
            const int64_t num_k = p.k - k < piece ? p.k - k : piece;
            Q8Tile tile;
            tile.q = p.q + row * kDigits * p.k + k;
            tile.scale = p.scale + (row * p.k + k) / 32;
            tile.sum = p.sum + (row * p.k + k) / 16;
            tile.q_sums = q_sums;
            tile.k = p.k;
            tile.num_planes = num_k / kPlaneK;
            tile.y_stride = p.y_stride;
            tile.first = k == 0;
            if (kNeedsQ8Sums<kBits>) sum_q8(tile.q, p.k, rows * kDigits, tile.num_planes, q_sums);
            for (int64_t panel = panels.begin; panel < panels.end; panel++) {
                const int64_t column = panel * kPanelRows;
                const uint8_t *packed = weight + panel * Scheme::panel_bytes(p.k) + Scheme::panel_bytes(k);
                tile.y = p.y + row * p.y_stride + column;
                tile.columns = p.n - column < kPanelRows ? p.n - column : kPanelRows;
                tile.bias = p.bias && k + num_k == p.k ? p.bias + column : nullptr;
                if constexpr (kReadsPackedQ8) {
                    if (num_rows < kFewRows) {
                        multiply_q8_rows(PackedPanel<Scheme>{packed}, tile, rows);
                        continue;
                    }
                }
                expand_panel<Scheme>(packed, 0, tile.num_planes, expanded);
#if defined(__AMX_INT8__)
                multiply_amx_rows(ExpandedPanel<kBits>{expanded}, tile, rows);
#else
                multiply_q8_rows(ExpandedPanel<kBits>{expanded}, tile, rows);
#endif
            }
        }
    }
#if defined(__AMX_INT8__)
    if (num_rows >= kAmxRows) _tile_release();
#endif
}

}  // namespace castiron
