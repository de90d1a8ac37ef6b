// y = x . weight^T with f32 activations, for every weight scheme. Tiles of activation rows are multiplied
// with a piece (some k) of a panel, in f32 [k][16 rows]; where the weights aren't, few rows convert them as
// they are read, many rows bring a piece to f32 once.
//
// Every y element adds its products in the order of k in one accumulator, whatever the tile, the block of
// rows, the piece of k (partial sums pass through y unrounded) or the thread: results don't depend on them.
#pragma once
#include "../abi.h"
#include "registry.h"
#include "scheme_blocks.h"
#include "simd.h"

namespace castiron {

#if defined(__AVX512F__)
constexpr int kTileRowsF32 = 12;
#elif defined(__AVX2__)
constexpr int kTileRowsF32 = 6;  // 12 accumulators, 2 weights and a broadcast fill 16 registers
#else
constexpr int kTileRowsF32 = 2;
#endif
constexpr int64_t kPieceK = 512;         // 32 KiB of f32 weights
constexpr int64_t kBlockRows = 96;       // activations of a piece stay in the L2 cache: 192 KiB
constexpr int kPrefetchF32Bytes = 2048;  // ahead; panels follow one another
static_assert(kPieceK * kPanelRows * sizeof(float) <= kScratchBytes);

// Consecutive rows of x and y, a piece of k, 16 columns of which `columns` are real.
struct F32Tile {
    const float *x;
    int64_t x_stride;
    const void *weight;  // of the piece
    int64_t num_k;
    float *y;
    int64_t y_stride, columns;
    const float *bias;  // of these columns; null: none, or not the last piece
    bool first;         // piece of k

    // Reader::kStep k at a time: Reader::load(weight, k, weights) gives them as f32.
    template <typename Reader, int rows>
    void multiply() const {
        constexpr int kStep = Reader::kStep;
        F32x16 sums[rows];
        for (int i = 0; i < rows; i++)
            sums[i] = first ? F32x16::zero() : load_partial(y + i * y_stride, columns);
        F32x16 weights[kStep];
        int64_t k = 0;
        for (; k + kStep <= num_k; k += kStep) {
            Reader::load(weight, k, weights);
            for (int step = 0; step < kStep; step++)
                for (int i = 0; i < rows; i++)
                    sums[i] = fma(F32x16::broadcast(x[i * x_stride + k + step]), weights[step], sums[i]);
        }
        if (k < num_k) {  // an odd k of pairs
            Reader::load(weight, k, weights);
            for (int i = 0; i < rows; i++)
                sums[i] = fma(F32x16::broadcast(x[i * x_stride + k]), weights[0], sums[i]);
        }
        for (int i = 0; i < rows; i++) {
            if (bias) sums[i] = sums[i] + load_partial(bias, columns);
            store_partial(sums[i], y + i * y_stride, columns);
        }
    }
};

// num_rows (at most `rows`) rows at once.
template <typename Reader, int rows = kTileRowsF32>
void multiply_f32_tile(const F32Tile &tile, int64_t num_rows) {
    if constexpr (rows > 0) {
        if (num_rows == rows) return tile.multiply<Reader, rows>();
        multiply_f32_tile<Reader, rows - 1>(tile, num_rows);
    }
}

// Any number of rows with f32 weights (linear_f32_rows.cpp).
void multiply_f32_rows(F32Tile tile, int64_t num_rows);

// Weights has panel_bytes(k); piece(panel, k_begin, num_k, scratch) giving f32 [num_k][16]; and, if kReads,
// a Reader of the packed form with packed(panel, k_begin) giving what it reads.
template <typename Weights>
void linear_f32(const LinearParams &p, const Context &context) {
    const int64_t num_rows = live_count(p.count, context);
    const Range panels = share((p.n + kPanelRows - 1) / kPanelRows, context);
    const auto *weight = static_cast<const uint8_t *>(p.weight);
    auto *scratch = reinterpret_cast<float *>(context.scratch);
    const bool few = num_rows <= kTileRowsF32;

    auto multiply = [&](int64_t row, int64_t block_rows, int64_t panel, int64_t k, int64_t num_k) {
        const uint8_t *packed = weight + panel * Weights::panel_bytes(p.k);
        const int64_t column = panel * kPanelRows;
        F32Tile tile;
        tile.x = p.x + row * p.x_stride + k;
        tile.x_stride = p.x_stride;
        tile.num_k = num_k;
        tile.y = p.y + row * p.y_stride + column;
        tile.y_stride = p.y_stride;
        tile.columns = p.n - column < kPanelRows ? p.n - column : kPanelRows;
        tile.bias = p.bias && k + num_k == p.k ? p.bias + column : nullptr;
        tile.first = k == 0;
        if constexpr (Weights::kReads) {
            if (few) {
                tile.weight = Weights::packed(packed, k);
                return multiply_f32_tile<typename Weights::Reader>(tile, block_rows);
            }
        }
        tile.weight = Weights::piece(packed, k, num_k, scratch);
        multiply_f32_rows(tile, block_rows);
    };
    auto smaller = [](int64_t a, int64_t b) { return a < b ? a : b; };

    if (few && num_rows > 0) {  // bound by reading the weights: panel by panel, in memory's order
        const int64_t piece = Weights::kReads ? p.k : kPieceK;
        for (int64_t panel = panels.begin; panel < panels.end; panel++)
            for (int64_t k = 0; k < p.k; k += piece) multiply(0, num_rows, panel, k, smaller(piece, p.k - k));
        return;
    }
    for (int64_t row = 0; row < num_rows; row += kBlockRows)
        for (int64_t k = 0; k < p.k; k += kPieceK)
            for (int64_t panel = panels.begin; panel < panels.end; panel++)
                multiply(row, smaller(kBlockRows, num_rows - row), panel, k, smaller(kPieceK, p.k - k));
}

}  // namespace castiron
