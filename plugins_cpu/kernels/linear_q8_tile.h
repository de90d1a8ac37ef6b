// Tiles of linear_q8.h: a few activation rows times the 16 weight rows of a panel, read packed or expanded.
#pragma once
#include "linear_q8_dot.h"
#include "scheme_blocks.h"

namespace castiron {

constexpr int kDigits = 2;  // of an activation: 256 * q[0] + q[1]

// What a tile multiplies: consecutive rows of activations from a piece of k on, and 16 columns of y.
struct Q8Tile {
    const int8_t *q;  // two digits a row: [rows][2][k]
    const float *scale, *sum;
    const int32_t *q_sums;  // sums of the q of 32 k, [rows][2][num_planes]; only where kNeedsQ8Sums
    int64_t k;              // of the whole matrix: the strides of q's digits, scale (k / 32) and sum (k / 16)
    int64_t num_planes;     // of the piece
    float *y;
    int64_t y_stride, columns;  // columns: how many of the 16 are real
    const float *bias;          // of these columns; null: none, or not the last piece
    bool first;                 // piece of k

    F32x16 load_y(int row) const {
        return first ? F32x16::zero() : load_partial(y + row * y_stride, columns);
    }
    void store_y(int row, F32x16 value) const {
        if (bias) value = value + load_partial(bias, columns);
        store_partial(value, y + row * y_stride, columns);
    }
    void advance(int64_t rows) {
        q += rows * kDigits * k;
        scale += rows * (k / 32);
        sum += rows * (k / 16);
        q_sums += rows * kDigits * num_planes;
        y += rows * y_stride;
    }
};

// 32 k of a panel: codes as bytes (floats on the generic level), scales as f32.
template <int bits>
struct alignas(64) ExpandedPlane {
    Q8Code codes[kPlaneGroups * kGroupBytes];
    float scale[kScaleGroups<bits>][kPanelRows];
    float minimum[kScaleGroups<bits>][kPanelRows];
};

template <int bits>
struct ExpandedPanel {
    static constexpr int kBits = bits;
    static constexpr bool kPacked = false;
    const ExpandedPlane<bits> *planes;

    const Q8Code *codes(int64_t plane) const { return planes[plane].codes; }
    Scales scales(int64_t plane, int group) const {
        return {F32x16::load(planes[plane].scale[group]), F32x16::load(planes[plane].minimum[group])};
    }
};

template <typename Scheme>
struct PackedPanel {
    static constexpr int kBits = Scheme::kBits;
    static constexpr bool kPacked = true;
    static constexpr int kPrefetchBytes = 2048;  // ahead; panels follow one another
    const uint8_t *panel;

    const uint8_t *codes(int64_t plane) const {
        const uint8_t *codes = Scheme::codes(panel, plane);
        for (int line = 0; line < (Scheme::kBlockBytes / Scheme::kSubblocks + 63) / 64; line++)
            prefetch(codes + kPrefetchBytes + line * 64);
        return codes;
    }
    Scales scales(int64_t plane, int group) const { return Scheme::plane_scales(panel, plane, group); }
};

// 256 * high + low; both are integers below 2^24, so the result is the exact sum rounded once on every level.
CASTIRON_INLINE F32x16 combine_digits(F32x16 high, F32x16 low) {
    return fma(F32x16::broadcast(256.0f), high, low);
}

// y plus one scale group's part of the sum over k. Every path to a y element goes through here.
template <int bits>
CASTIRON_INLINE F32x16 add_group(F32x16 y, const Q8Tile &tile, int row, int64_t plane, int group,
                                 const Scales &weight, F32x16 dots) {
    const int64_t at = row * (tile.k / 32) + plane;
    if constexpr (bits != 8) {
        const float sum =
            kScaleGroups<bits> == 1 ? tile.sum[at * 2] + tile.sum[at * 2 + 1] : tile.sum[at * 2 + group];
        y = fma(weight.minimum, F32x16::broadcast(sum), y);
    }
    return fma(F32x16::broadcast(tile.scale[at]) * weight.scale, dots, y);
}

template <typename Panel, int rows>
void multiply_q8_tile(const Panel &panel, const Q8Tile &tile) {
    constexpr int kBits = Panel::kBits, kGroups = kScaleGroups<kBits>;
    F32x16 y[rows];
    for (int i = 0; i < rows; i++) y[i] = tile.load_y(i);
    for (int64_t plane = 0; plane < tile.num_planes; plane++) {
        const auto *codes = panel.codes(plane);
        CASTIRON_UNROLL
        for (int group = 0; group < kGroups; group++) {
            const Scales weight = panel.scales(plane, group);
            F32x16 dots[rows * kDigits];  // of the digits, as if each were a row
            dot_products<kBits, Panel::kPacked, rows * kDigits>(
                codes, group, tile.q + plane * kPlaneK, tile.k, tile.q_sums + plane, tile.num_planes, dots);
            for (int i = 0; i < rows; i++) {
                const F32x16 dot = combine_digits(dots[kDigits * i], dots[kDigits * i + 1]);
                y[i] = add_group<kBits>(y[i], tile, i, plane, group, weight, dot);
            }
        }
    }
    for (int i = 0; i < rows; i++) tile.store_y(i, y[i]);
}

// num_rows rows, in tiles of `rows`, the rest in tiles of half as many and so on.
template <typename Panel, int rows = kTileRowsQ8>
void multiply_q8_rows(const Panel &panel, Q8Tile tile, int64_t num_rows) {
    for (; num_rows >= rows; num_rows -= rows) {
        multiply_q8_tile<Panel, rows>(panel, tile);
        tile.advance(rows);
    }
    if constexpr (rows > 1) {
        if (num_rows > 0) multiply_q8_rows<Panel, rows / 2>(panel, tile, num_rows);
    }
}

}  // namespace castiron
