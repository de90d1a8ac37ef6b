#include <cmath>
#include <cstring>

#include "kv_write.h"
#include "registry.h"

namespace castiron {
namespace {

void rope_cos_sin(const RopeCosSinParams &p, const Context &context) {
    const Range mine = share(live_count(p.count, context), context);
    for (int64_t token = mine.begin; token < mine.end; ++token) {
        const float position = static_cast<float>(p.positions[token]);
        for (int64_t i = 0; i < p.half; ++i) {
            const float angle = position * p.inv_freq[i];  // in float, as the models were trained
            p.cos[token * p.half + i] = std::cos(angle) * p.scaling;
            p.sin[token * p.half + i] = std::sin(angle) * p.scaling;
        }
    }
}

// Rotates one head: pairs (i, i + half) of its first 2 * half dims; the rest passes. y may be x.
void rotate_head(const float *x, const float *cos, const float *sin, float *y, int64_t half,
                 int64_t head_dim) {
    for (int64_t i = 0; i < half; i += kVecLanes) {
        const int n = static_cast<int>(half - i < kVecLanes ? half - i : kVecLanes);
        const Vec first = load_first(x + i, n), second = load_first(x + half + i, n);
        const Vec c = load_first(cos + i, n), s = load_first(sin + i, n);
        store_first(y + i, first * c - second * s, n);
        store_first(y + half + i, second * c + first * s, n);
    }
    if (y != x && head_dim > 2 * half) {
        std::memcpy(y + 2 * half, x + 2 * half, static_cast<size_t>(head_dim - 2 * half) * sizeof(float));
    }
}

void apply_rope(const ApplyRopeParams &p, const Context &context) {
    const Range mine = share(live_count(p.count, context) * p.num_heads, context);
    for (int64_t item = mine.begin; item < mine.end; ++item) {
        const int64_t token = item / p.num_heads, head = item % p.num_heads;
        rotate_head(p.x + token * p.x_stride + head * p.head_dim, p.cos + token * p.half,
                    p.sin + token * p.half, p.y + token * p.y_stride + head * p.head_dim, p.half, p.head_dim);
    }
}

constexpr int64_t kPieceDims = 256;  // of a head that isn't kept whole on the stack

// rotate_head, the result going to the cache.
template <typename Element>
void rotate_head_to_cache(const float *x, const float *cos, const float *sin, Element *to, int64_t half,
                          int64_t head_dim) {
    for (int64_t begin = 0; begin < half; begin += kPieceDims) {
        const int64_t count = half - begin < kPieceDims ? half - begin : kPieceDims;
        float first[kPieceDims], second[kPieceDims];
        for (int64_t i = 0; i < count; i += kVecLanes) {
            const int n = static_cast<int>(count - i < kVecLanes ? count - i : kVecLanes);
            const float *at = x + begin + i;
            const Vec a = load_first(at, n), b = load_first(at + half, n);
            const Vec c = load_first(cos + begin + i, n), s = load_first(sin + begin + i, n);
            store_first(first + i, a * c - b * s, n);
            store_first(second + i, b * c + a * s, n);
        }
        write_elements(first, to + begin, count);
        write_elements(second, to + half + begin, count);
    }
    write_elements(x + 2 * half, to + 2 * half, head_dim - 2 * half);
}

template <typename Element>
void rope_kv_write(const RopeKvWriteParams &p, const Context &context) {
    const CacheShape shape{p.kv_heads, p.block_size, p.head_dim};
    Element *cache = static_cast<Element *>(p.cache);
    const int64_t heads = p.num_heads + p.kv_heads;
    const Range mine = share(live_count(p.count, context) * heads, context);
    for (int64_t item = mine.begin; item < mine.end; ++item) {
        const int64_t token = item / heads;
        const float *cos = p.cos + token * p.half, *sin = p.sin + token * p.half;
        if (item % heads < p.num_heads) {
            const int64_t at = item % heads * p.head_dim;
            rotate_head(p.q + token * p.q_stride + at, cos, sin, p.q_out + token * p.q_out_stride + at,
                        p.half, p.head_dim);
            continue;
        }
        const int64_t head = item % heads - p.num_heads, at = head * p.head_dim, slot = p.slot_mapping[token];
        if (slot < 0) continue;
        rotate_head_to_cache(p.k + token * p.k_stride + at, cos, sin,
                             cache + shape.slot_index(slot, kKey, head), p.half, p.head_dim);
        write_elements(p.v + token * p.v_stride + at, cache + shape.slot_index(slot, kValue, head),
                       p.head_dim);
    }
}

CASTIRON_KERNEL("rope_cos_sin", RopeCosSinParams, rope_cos_sin);
CASTIRON_KERNEL("apply_rope", ApplyRopeParams, apply_rope);
CASTIRON_KERNEL("rope_kv_write.f32", RopeKvWriteParams, rope_kv_write<float>);
CASTIRON_KERNEL("rope_kv_write.f16", RopeKvWriteParams, rope_kv_write<uint16_t>);

}  // namespace
}  // namespace castiron
