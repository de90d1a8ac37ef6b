// The register tiles of linear_f32.h.
#include "linear_f32.h"

namespace castiron {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#elif defined(__AVX2__)
constexpr int kTileRows = 6;  // 12 accumulators, 2 weights and a broadcast fill 16 registers
#else
constexpr int kTileRows = 2;
#endif

template <int rows>
inline void multiply_tile(const F32Tile &tile) {
    F32x16 sums[rows];
    for (int i = 0; i < rows; i++)
        sums[i] = tile.first ? F32x16::zero() : load_partial(tile.y + i * tile.y_stride, tile.columns);
    for (int64_t k = 0; k < tile.num_k; k++) {
        const F32x16 weight = F32x16::load(tile.weight + k * kPanelRows);
        for (int i = 0; i < rows; i++)
            sums[i] = fma(F32x16::broadcast(tile.x[i * tile.x_stride + k]), weight, sums[i]);
    }
    for (int i = 0; i < rows; i++) {
        if (tile.bias) sums[i] = sums[i] + load_partial(tile.bias, tile.columns);
        store_partial(sums[i], tile.y + i * tile.y_stride, tile.columns);
    }
}

template <int rows = kTileRows>
inline void multiply_last_tile(const F32Tile &tile, int64_t num_rows) {
    if constexpr (rows > 0) {
        if (num_rows == rows) return multiply_tile<rows>(tile);
        multiply_last_tile<rows - 1>(tile, num_rows);
    }
}

}  // namespace

void multiply_f32_rows(F32Tile tile, int64_t num_rows) {
    for (; num_rows >= kTileRows; num_rows -= kTileRows) {
        multiply_tile<kTileRows>(tile);
        tile.x += kTileRows * tile.x_stride;
        tile.y += kTileRows * tile.y_stride;
    }
    multiply_last_tile(tile, num_rows);
}

}  // namespace castiron
