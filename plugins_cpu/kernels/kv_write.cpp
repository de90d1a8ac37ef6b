#include "kv_write.h"

#include "registry.h"

namespace castiron {
namespace {

template <typename Element>
void kv_write(const KvWriteParams &p, const Context &context) {
    const CacheShape shape{p.kv_heads, p.block_size, p.head_dim};
    Element *cache = static_cast<Element *>(p.cache);
    const Range mine = share(live_count(p.count, context) * p.kv_heads, context);
    for (int64_t item = mine.begin; item < mine.end; ++item) {
        const int64_t token = item / p.kv_heads, head = item % p.kv_heads, slot = p.slot_mapping[token];
        if (slot < 0) continue;
        write_elements(p.k + token * p.k_stride + head * p.head_dim,
                       cache + shape.slot_index(slot, kKey, head), p.head_dim);
        write_elements(p.v + token * p.v_stride + head * p.head_dim,
                       cache + shape.slot_index(slot, kValue, head), p.head_dim);
    }
}

CASTIRON_KERNEL("kv_write.f32", KvWriteParams, kv_write<float>);
CASTIRON_KERNEL("kv_write.f16", KvWriteParams, kv_write<uint16_t>);

}  // namespace
}  // namespace castiron
