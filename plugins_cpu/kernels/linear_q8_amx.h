// Tiles of 16 activation rows on AMX: the integer dot products in tile registers, then the same f32 operations
// in the same order as multiply_q8_tile, so both give the same bits.
#pragma once
#include "linear_q8_tile.h"

#if defined(__AMX_INT8__) && defined(__AVX512VNNI__)

namespace castiron {

constexpr int kAmxRows = 16;

// Tile registers: 0, 1 dot products; 2, 3 activations; 4, 5 weights. Loaded before multiply_amx_tile<bits>.
template <int bits>
void load_tile_config() {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    static_assert(sizeof config == 64);
    constexpr int kGroupK = kPlaneK / kScaleGroups<bits>;
    for (int i = 0; i < 2; i++) {
        config.rows[i] = kAmxRows;
        config.row_bytes[i] = kPanelRows * 4;
        config.rows[2 + i] = kAmxRows;
        config.row_bytes[2 + i] = kGroupK;
        config.rows[4 + i] = kGroupK / 4;
        config.row_bytes[4 + i] = kGroupBytes;
    }
    __asm__ volatile("" : : "r"(&config) : "memory");  // GCC 12 takes ldtilecfg to read 8 bytes only
    _tile_loadconfig(&config);
}

struct alignas(64) AmxDots {
    int32_t values[kAmxRows][kPanelRows];
};

// Dot products of one scale group (step = plane * groups + group) into `dots`. The tile numbers are part of the
// instructions, hence the two branches.
template <int bits, int buffer>
CASTIRON_INLINE void amx_dot_products(const ExpandedPanel<bits> &panel, const Q8Tile &tile, int64_t step,
                                      AmxDots *dots) {
    constexpr int kGroups = kScaleGroups<bits>, kGroupK = kPlaneK / kGroups;
    const uint8_t *codes = panel.codes(step / kGroups) + step % kGroups * (kGroupK / 4) * kGroupBytes;
    const int8_t *q = tile.q + step * kGroupK;
    if constexpr (buffer == 0) {
        _tile_zero(0);
        _tile_loadd(2, q, tile.k);
        _tile_loadd(4, codes, kGroupBytes);
        _tile_dpbsud(0, 2, 4);
        _tile_stored(0, dots->values, kPanelRows * 4);
    } else {
        _tile_zero(1);
        _tile_loadd(3, q, tile.k);
        _tile_loadd(5, codes, kGroupBytes);
        _tile_dpbsud(1, 3, 5);
        _tile_stored(1, dots->values, kPanelRows * 4);
    }
}

template <int bits>
CASTIRON_INLINE void add_amx_group(F32x16 *y, const ExpandedPanel<bits> &panel, const Q8Tile &tile, int64_t step,
                                   const AmxDots &dots) {
    constexpr int kGroups = kScaleGroups<bits>;
    const int64_t plane = step / kGroups;
    const int group = static_cast<int>(step % kGroups);
    const Scales weight = panel.scales(plane, group);
    for (int i = 0; i < kAmxRows; i++) {
        __m512i sums = _mm512_load_si512(dots.values[i]);
        if constexpr (kNeedsQ8Sums<bits>)
            sums = _mm512_sub_epi32(sums, _mm512_set1_epi32(kByteOffset * tile.q_sums[i * tile.num_planes + plane]));
        y[i] = add_group<bits>(y[i], tile, i, plane, group, weight, F32x16{_mm512_cvtepi32_ps(sums)});
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
