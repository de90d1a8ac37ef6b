// y[t] = row token_ids[t] of the packed table, in f32, exactly the checkpoint's values.
//
// A CTA writes kColumns columns of a token. An id v < 0 stands for last_token[-1 - v], which an earlier
// kernel may have written; ids outside the vocabulary are clamped to it.
//
// -DSCHEME=SCHEME_...
#include "abi.cuh"
#include "kernels/weight_tile.cuh"

namespace castiron {

constexpr int kThreads = 128;
constexpr int kColumns = 4 * kThreads;

}  // namespace castiron

extern "C" __global__ void __launch_bounds__(castiron::kThreads)
    embedding(const __grid_constant__ castiron::EmbeddingParams p) {
    using namespace castiron;
    const int token = blockIdx.x;
    let_next_start();
    int id = token < p.header[p.count] ? p.token_ids[token] : 0;
    wait_for_inputs();
    if (token >= p.header[p.count]) return;
    if (id < 0) id = p.max_rows > 0 ? p.last_token[min(-1 - id, p.max_rows - 1)] : 0;
    id = min(max(id, 0), p.vocab - 1);

    const int column = blockIdx.y * kColumns + threadIdx.x * 4;
    if (column >= p.dim) return;
    const int64_t tiles = (p.dim + kUnit - 1) / kUnit;
    const int64_t tile = id / kTileRows * tiles + column / kUnit;
    const uint8_t *from = static_cast<const uint8_t *>(p.table) + tile * kTileBytes;
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = load_element(from, id % kTileRows, column % kUnit + i);
    float *to = p.y + token * p.y_stride + column;
    if (column + 4 <= p.dim && (reinterpret_cast<uint64_t>(to) & 15) == 0) {
        *reinterpret_cast<float4 *>(to) = make_float4(values[0], values[1], values[2], values[3]);
    } else {
        for (int i = 0; i < 4 && column + i < p.dim; ++i) to[i] = values[i];
    }
}
