// y = x . weight^T with f32 activations, for every weight scheme: the weight is brought to f32 [k][16 rows] a
// piece of a panel at a time, and tiles of activation rows are multiplied with it.
//
// Every y element adds its products in the order of k in one accumulator, whatever the tile, the block of
// rows, the piece of k (partial sums pass through y unrounded) or the thread: results don't depend on them.
#pragma once
#include "../abi.h"
#include "registry.h"
#include "scheme_blocks.h"
#include "simd.h"

namespace castiron {

constexpr int64_t kPieceK = 512;    // 32 KiB of f32 weights
constexpr int64_t kBlockRows = 96;  // activations of a piece stay in the L2 cache: 192 KiB
static_assert(kPieceK * kPanelRows * sizeof(float) <= kScratchBytes);

// Consecutive rows of x and y, a piece of k, 16 columns of which `columns` are real.
struct F32Tile {
    const float *x;
    int64_t x_stride;
    const float *weight;  // [num_k][16]
    int64_t num_k;
    float *y;
    int64_t y_stride, columns;
    const float *bias;  // of these columns; null: none, or not the last piece
    bool first;         // piece of k
};

// Multiplies num_rows rows, in tiles of as many as the registers hold.
void multiply_f32_rows(F32Tile tile, int64_t num_rows);

// Weights::panel_bytes(k), and Weights::piece(panel, k_begin, num_k, scratch) giving f32 [num_k][16].
template <typename Weights>
void linear_f32(const LinearParams &p, const Context &context) {
    const int64_t num_rows = live_count(p.count, context);
    const Range panels = share((p.n + kPanelRows - 1) / kPanelRows, context);
    const auto *weight = static_cast<const uint8_t *>(p.weight);
    auto *scratch = reinterpret_cast<float *>(context.scratch);
    for (int64_t row = 0; row < num_rows; row += kBlockRows) {
        const int64_t block_rows = num_rows - row < kBlockRows ? num_rows - row : kBlockRows;
        for (int64_t k = 0; k < p.k; k += kPieceK) {
            const int64_t num_k = p.k - k < kPieceK ? p.k - k : kPieceK;
            for (int64_t panel = panels.begin; panel < panels.end; panel++) {
                const int64_t column = panel * kPanelRows;
                F32Tile tile;
                tile.x = p.x + row * p.x_stride + k;
                tile.x_stride = p.x_stride;
                tile.weight = Weights::piece(weight + panel * Weights::panel_bytes(p.k), k, num_k, scratch);
                tile.num_k = num_k;
                tile.y = p.y + row * p.y_stride + column;
                tile.y_stride = p.y_stride;
                tile.columns = p.n - column < kPanelRows ? p.n - column : kPanelRows;
                tile.bias = p.bias && k + num_k == p.k ? p.bias + column : nullptr;
                tile.first = k == 0;
                multiply_f32_rows(tile, block_rows);
            }
        }
    }
}

}  // namespace castiron
