// Where a token's key and value of one head live in a paged cache, and how they are written.
#pragma once
#include <cstdint>

#include "float_vector.h"

namespace castiron {

enum KvPart : int64_t { kKey = 0, kValue = 1 };

// Dimensions of a cache [num_blocks, 2, kv_heads, block_size, head_dim].
struct CacheShape {
    int64_t kv_heads, block_size, head_dim;

    // element index of [block, part, head, offset, 0]
    int64_t index(int64_t block, KvPart part, int64_t head, int64_t offset) const {
        return (((block * 2 + part) * kv_heads + head) * block_size + offset) * head_dim;
    }
    int64_t slot_index(int64_t slot, KvPart part, int64_t head) const {
        return index(slot / block_size, part, head, slot % block_size);
    }
};

template <typename Element>
void write_elements(const float *from, Element *to, int64_t count) {
    int64_t i = 0;
    for (; i + kVecLanes <= count; i += kVecLanes) store_elements(to + i, load(from + i));
    for (; i < count; ++i) store_element(to + i, from[i]);
}

}  // namespace castiron
