// Tiles of 16 activation rows on AMX: the integer dot products in tile registers, then the same f32
// operations in the same order as multiply_q8_tile, so both give the same bits.
#pragma once
#include "linear_q8_tile.h"

#if defined(__AMX_INT8__) && defined(__AVX512VNNI__)

namespace castiron {

constexpr int kAmxRows = 16;

// Tile registers: 0 to 3 dot products (high and low digits, of two steps); 4, 5 activations; 6, 7 weights.
// Loaded before multiply_amx_tile<bits>.
template <int bits>
void load_tile_config() {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    static_assert(sizeof config == 64);
    constexpr int kGroupK = kPlaneK / kScaleGroups<bits>;
    for (int i = 0; i < 4; i++) {
        config.rows[i] = kAmxRows;
        config.row_bytes[i] = kPanelRows * 4;
    }
    for (int i = 0; i < 2; i++) {
        config.rows[4 + i] = kAmxRows;
        config.row_bytes[4 + i] = kGroupK;
        config.rows[6 + i] = kGroupK / 4;
        config.row_bytes[6 + i] = kGroupBytes;
    }
    __asm__ volatile("" : : "r"(&config) : "memory");  // GCC 12 takes ldtilecfg to read 8 bytes only
    _tile_loadconfig(&config);
}

struct alignas(64) AmxDots {
    int32_t values[kDigits][kAmxRows][kPanelRows];
};

// Dot products of one scale group (step = plane * groups + group) into `dots`. The tile numbers are part of
// the instructions, hence the two branches.
template <int bits, int buffer>
CASTIRON_INLINE void amx_dot_products(const ExpandedPanel<bits> &panel, const Q8Tile &tile, int64_t step,
                                      AmxDots *dots) {
    constexpr int kGroups = kScaleGroups<bits>, kGroupK = kPlaneK / kGroups;
    const uint8_t *codes = panel.codes(step / kGroups) + step % kGroups * (kGroupK / 4) * kGroupBytes;
    const int8_t *q = tile.q + step * kGroupK;
    _tile_loadd(4, q, kDigits * tile.k);
    _tile_loadd(5, q + tile.k, kDigits * tile.k);
    if constexpr (buffer == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_loadd(6, codes, kGroupBytes);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 5, 6);
        _tile_stored(0, dots->values[0], kPanelRows * 4);
        _tile_stored(1, dots->values[1], kPanelRows * 4);
    } else {
        _tile_zero(2);
        _tile_zero(3);
        _tile_loadd(7, codes, kGroupBytes);
        _tile_dpbsud(2, 4, 7);
        _tile_dpbsud(3, 5, 7);
        _tile_stored(2, dots->values[0], kPanelRows * 4);
        _tile_stored(3, dots->values[1], kPanelRows * 4);
    }
}

template <int bits>
CASTIRON_INLINE void add_amx_group(F32x16 *y, const ExpandedPanel<bits> &panel, const Q8Tile &tile,
                                   int64_t step, const AmxDots &dots) {
    constexpr int kGroups = kScaleGroups<bits>;
    const int64_t plane = step / kGroups;
    const int group = static_cast<int>(step % kGroups);
    const Scales weight = panel.scales(plane, group);
    for (int i = 0; i < kAmxRows; i++) {
        F32x16 digits[kDigits];
        for (int digit = 0; digit < kDigits; digit++) {
            __m512i sums = _mm512_load_si512(dots.values[digit][i]);
            if constexpr (kNeedsQ8Sums<bits>) {
                const int32_t q_sum = tile.q_sums[(i * kDigits + digit) * tile.num_planes + plane];
                sums = _mm512_sub_epi32(sums, _mm512_set1_epi32(kByteOffset * q_sum));
            }
            digits[digit] = F32x16{_mm512_cvtepi32_ps(sums)};
        }
        y[i] = add_group<bits>(y[i], tile, i, plane, group, weight, combine_digits(digits[0], digits[1]));
    }
}

// Two steps at a time, so that the tile unit works on one while the other is scaled.
template <int bits>
void multiply_amx_tile(const ExpandedPanel<bits> &panel, const Q8Tile &tile) {
    AmxDots dots[2];
    F32x16 y[kAmxRows];
    for (int i = 0; i < kAmxRows; i++) y[i] = tile.load_y(i);
    const int64_t num_steps = tile.num_planes * kScaleGroups<bits>;
    int64_t step = 0;
    for (; step + 1 < num_steps; step += 2) {
        amx_dot_products<bits, 0>(panel, tile, step, &dots[0]);
        amx_dot_products<bits, 1>(panel, tile, step + 1, &dots[1]);
        add_amx_group<bits>(y, panel, tile, step, dots[0]);
        add_amx_group<bits>(y, panel, tile, step + 1, dots[1]);
    }
    if (step < num_steps) {
        amx_dot_products<bits, 0>(panel, tile, step, &dots[0]);
        add_amx_group<bits>(y, panel, tile, step, dots[0]);
    }
    for (int i = 0; i < kAmxRows; i++) tile.store_y(i, y[i]);
}

// Tiles of 16 rows; what is left, fewer than 16 rows, goes to the vector unit.
template <int bits>
void multiply_amx_rows(const ExpandedPanel<bits> &panel, Q8Tile tile, int64_t num_rows) {
    __asm__ volatile("" : : : "memory");  // the tile loads don't tell GCC that they read the expanded codes
    for (; num_rows >= kAmxRows; num_rows -= kAmxRows) {
        multiply_amx_tile<bits>(panel, tile);
        tile.advance(kAmxRows);
    }
    if (num_rows > 0) multiply_q8_rows(panel, tile, num_rows);
}

}  // namespace castiron

#endif
