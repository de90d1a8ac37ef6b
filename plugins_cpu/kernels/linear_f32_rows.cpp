// Any number of activation rows times a piece of f32 weights, in tiles of as many rows as the registers hold.
#include "linear_f32.h"

namespace castiron {
namespace {

struct F32Reader {
    static constexpr int kStep = 1;
    static void load(const void *weight, int64_t k, F32x16 *out) {
        out[0] = F32x16::load(static_cast<const float *>(weight) + k * kPanelRows);
    }
};

}  // namespace

void multiply_f32_rows(F32Tile tile, int64_t num_rows) {
    for (; num_rows >= kTileRowsF32; num_rows -= kTileRowsF32) {
        tile.multiply<F32Reader, kTileRowsF32>();
        tile.x += kTileRowsF32 * tile.x_stride;
        tile.y += kTileRowsF32 * tile.y_stride;
    }
    multiply_f32_tile<F32Reader>(tile, num_rows);
}

}  // namespace castiron
