// Rotates the queries, and writes rotated keys and values into the paged cache: one thread 16 elements, as
// two chunks of 8 of one head of one token. Rotary chunks come in pairs (chunk c of the first half, chunk c
// of the second), see RoFormer, arXiv:2104.09864; the dims after 2 * half and the values are copied.
#include "row_access.cuh"

namespace castiron {
namespace {

constexpr int kChunk = 8;  // elements of 16 bytes

// Where chunks are copied or rotated from and to.
struct Chunks {
    const bf16 *from;
    bf16 *to;           // null: nowhere
    int first, second;  // columns
    bool rotate;
};

__device__ __forceinline__ Chunks chunks_of(const RopeKvWriteParams &p, int64_t token, int item) {
    const int pairs = p.head_dim / (2 * kChunk), rotary_pairs = p.half / kChunk;  // of a head
    const int head = item / pairs, pair = item % pairs;
    const bool is_query = head < p.num_heads, is_value = head >= p.num_heads + p.kv_heads;
    Chunks c;
    c.rotate = !is_value && pair < rotary_pairs;
    c.first = c.rotate ? pair * kChunk : pair * 2 * kChunk;  // the copied ones start at 2 * half
    c.second = c.rotate ? p.half + c.first : c.first + kChunk;
    if (is_query) {
        c.from = p.q + token * p.q_stride + static_cast<int64_t>(head) * p.head_dim;
        c.to = p.q_out + token * p.q_out_stride + static_cast<int64_t>(head) * p.head_dim;
        return c;
    }
    const int kv_head = head - p.num_heads - (is_value ? p.kv_heads : 0);
    c.from = (is_value ? p.v + token * p.v_stride : p.k + token * p.k_stride) +
             static_cast<int64_t>(kv_head) * p.head_dim;
    const int64_t slot = p.slot_mapping[token];
    const int64_t block = slot / p.block_size, offset = slot - block * p.block_size;
    const int64_t row = ((block * 2 + (is_value ? 1 : 0)) * p.kv_heads + kv_head) * p.block_size + offset;
    c.to = slot < 0 ? nullptr : p.cache + row * p.head_dim;
    return c;
}

}  // namespace
}  // namespace castiron

extern "C" __global__ void __launch_bounds__(256, 1)
    rope_kv_write(const __grid_constant__ castiron::RopeKvWriteParams p) {
    using namespace castiron;
    const int items = (p.num_heads + 2 * p.kv_heads) * (p.head_dim / (2 * kChunk));  // of a token
    const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t token = index / items;
    const bool live = token < p.header[p.count];
    Chunks c = {};
    if (live) c = chunks_of(p, token, static_cast<int>(index - token * items));
    let_next_start();
    wait_for_inputs();
    if (!live || c.to == nullptr) return;
    if (!c.rotate) {
        const uint4 first = *reinterpret_cast<const uint4 *>(c.from + c.first);
        const uint4 second = *reinterpret_cast<const uint4 *>(c.from + c.second);
        *reinterpret_cast<uint4 *>(c.to + c.first) = first;
        *reinterpret_cast<uint4 *>(c.to + c.second) = second;
        return;
    }
    const Eight x = load_eight(c.from + c.first), y = load_eight(c.from + c.second);
    const Eight cosine = load_eight(p.cos + token * p.half + c.first);
    const Eight sine = load_eight(p.sin + token * p.half + c.first);
    Eight first, second;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        first.v[i] = x.v[i] * cosine.v[i] - y.v[i] * sine.v[i];
        second.v[i] = y.v[i] * cosine.v[i] + x.v[i] * sine.v[i];
    }
    store_eight(c.to + c.first, first);
    store_eight(c.to + c.second, second);
}
