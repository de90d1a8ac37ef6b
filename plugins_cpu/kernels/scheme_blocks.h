// The quantized blocks of the n16 layout (plugins_cpu/layouts.py): where a block's parts are, and what they
// mean. A weight's value is scale * code + minimum, both f32 and both products exact; the code is unsigned
// (zero points are folded into the minimum), except for 8 bits, where it is signed and there is no minimum.
#pragma once
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace castiron {

constexpr int kPanelRows = 16;
constexpr int kPlaneK = 32;      // k covered by one set of code planes
constexpr int kGroupBytes = 64;  // 16 rows x 4 k
constexpr int kPlaneGroups = 8;  // groups of 4 k in a set of planes

// The 16 rows' scales and minimums of one half (q6_k) or all of 32 k.
struct Scales {
    F32x16 scale, minimum;
};

inline F32x16 load_halves(const uint8_t *p) {
    uint16_t halves[kPanelRows];
    std::memcpy(halves, p, sizeof halves);
    return F32x16::load_f16(halves);
}

template <int bits>
constexpr int kScaleGroups = bits == 6 ? 2 : 1;  // scales per 32 k

// bits: of a code. subblocks: sets of planes (32 k each) in a block.
template <typename Scheme, int bits, int subblocks, int header_bytes>
struct BlockShape {
    static constexpr int kBits = bits;
    static constexpr int kSubblocks = subblocks;
    static constexpr int kHeaderBytes = header_bytes;
    static constexpr bool kHasMinimum = bits != 8;
    static constexpr int kPlaneBytes = kGroupBytes * bits;  // of 32 k
    static constexpr int kBlockBytes = header_bytes + subblocks * kPlaneBytes;
    static constexpr int kBlockK = subblocks * kPlaneK;

    static int64_t panel_bytes(int64_t k) { return k / kBlockK * kBlockBytes; }
    // Block holding the plane-th 32 k of a panel.
    static const uint8_t *block(const uint8_t *panel, int64_t plane) {
        return panel + plane / kSubblocks * kBlockBytes;
    }
    static const uint8_t *codes(const uint8_t *panel, int64_t plane) {
        return block(panel, plane) + kHeaderBytes + plane % kSubblocks * kPlaneBytes;
    }
    // Of the plane-th 32 k, or their group-th 16 (q6_k).
    static Scales plane_scales(const uint8_t *panel, int64_t plane, int group) {
        return Scheme::block_scales(block(panel, plane), static_cast<int>(plane % kSubblocks), group);
    }
};

template <typename Scheme, int bits, int zero_point>
struct Symmetric : BlockShape<Scheme, bits, 1, 32> {
    static Scales block_scales(const uint8_t *block, int, int) {
        const F32x16 scale = load_halves(block);
        return {scale, scale * F32x16::broadcast(-static_cast<float>(zero_point))};
    }
};
template <typename Scheme, int bits>
struct WithMinimum : BlockShape<Scheme, bits, 1, 64> {
    static Scales block_scales(const uint8_t *block, int, int) {
        return {load_halves(block), load_halves(block + 32)};
    }
};
// Scales of a 32-k subblock are 6-bit multiples of the block's, packed as in ggml's q4_K.
template <typename Scheme, int bits>
struct SuperBlock : BlockShape<Scheme, bits, 8, 64 + 12 * kPanelRows> {
    static Scales block_scales(const uint8_t *block, int subblock, int) {
        uint8_t scale[kPanelRows], minimum[kPanelRows];
        const uint8_t *packed = block + 64;
        const uint8_t *low = packed + (subblock & 3) * kPanelRows, *middle = low + 4 * kPanelRows,
                      *high = low + 8 * kPanelRows;
        if (subblock < 4) {
            for (int r = 0; r < kPanelRows; r++) {
                scale[r] = low[r] & 63;
                minimum[r] = middle[r] & 63;
            }
        } else {
            for (int r = 0; r < kPanelRows; r++) {
                scale[r] = static_cast<uint8_t>((high[r] & 15) | (low[r] >> 6) << 4);
                minimum[r] = static_cast<uint8_t>(high[r] >> 4 | (middle[r] >> 6) << 4);
            }
        }
        return {load_halves(block) * F32x16::load_u8(scale),
                F32x16::zero() - load_halves(block + 32) * F32x16::load_u8(minimum)};
    }
};

struct Q4_0 : Symmetric<Q4_0, 4, 8> {};
struct Q4_1 : WithMinimum<Q4_1, 4> {};
struct Q5_0 : Symmetric<Q5_0, 5, 16> {};
struct Q5_1 : WithMinimum<Q5_1, 5> {};
struct Q8_0 : Symmetric<Q8_0, 8, 0> {};
struct Q4_K : SuperBlock<Q4_K, 4> {};
struct Q5_K : SuperBlock<Q5_K, 5> {};
// Scales of 16 k are signed 8-bit multiples of the block's.
struct Q6_K : BlockShape<Q6_K, 6, 8, 32 + 16 * kPanelRows> {
    static Scales block_scales(const uint8_t *block, int subblock, int group) {
        const uint8_t *packed = block + 32 + (subblock * 2 + group) * kPanelRows;
        const F32x16 scale = load_halves(block) * F32x16::load_i8(reinterpret_cast<const int8_t *>(packed));
        return {scale, scale * F32x16::broadcast(-32.0f)};
    }
};

// One byte per code from the planes of 32 k: out[group][row * 4 + k % 4]. 8-bit codes stay signed.
template <int bits>
inline void expand_codes(const uint8_t *planes, uint8_t *out) {
    if constexpr (bits == 8) {
        std::memcpy(out, planes, kPlaneGroups * kGroupBytes);
        return;
    }
    for (int i = 0; i < 4 * kGroupBytes; i++) {
        out[i] = planes[i] & 15;
        out[i + 4 * kGroupBytes] = planes[i] >> 4;
    }
    const uint8_t *high = planes + 4 * kGroupBytes;
    if constexpr (bits == 5) {
        for (int g = 0; g < kPlaneGroups; g++)
            for (int i = 0; i < kGroupBytes; i++)
                out[g * kGroupBytes + i] |= static_cast<uint8_t>((high[i] >> g & 1) << 4);
    }
    if constexpr (bits == 6) {
        for (int g = 0; g < kPlaneGroups; g++)
            for (int i = 0; i < kGroupBytes; i++)
                out[g * kGroupBytes + i] |=
                    static_cast<uint8_t>((high[g / 4 * kGroupBytes + i] >> g % 4 * 2 & 3) << 4);
    }
}

// The codes of 32 k as f32 [32][16], from expand_codes' bytes.
template <int bits>
inline void widen_codes(const uint8_t *codes, float *out) {
    for (int g = 0; g < kPlaneGroups; g++) {
        uint32_t words[kPanelRows];  // a row's 4 k, the first in the low byte
        std::memcpy(words, codes + g * kGroupBytes, sizeof words);
        for (int j = 0; j < 4; j++) {
            for (int r = 0; r < kPanelRows; r++) {
                const int32_t code = bits == 8 ? static_cast<int32_t>(words[r] << (24 - 8 * j)) >> 24
                                               : static_cast<int32_t>(words[r] >> 8 * j & 255);
                out[(g * 4 + j) * kPanelRows + r] = static_cast<float>(code);
            }
        }
    }
}

// The weights of the plane-th 32 k of a panel, exactly as the checkpoint's format defines them: f32 [32][16].
template <typename Scheme>
inline void dequantize_plane(const uint8_t *panel, int64_t plane, float *out) {
    uint8_t codes[kPlaneGroups * kGroupBytes];
    expand_codes<Scheme::kBits>(Scheme::codes(panel, plane), codes);
    widen_codes<Scheme::kBits>(codes, out);
    constexpr int kGroupK = kPlaneK / kScaleGroups<Scheme::kBits>;
    for (int group = 0; group < kScaleGroups<Scheme::kBits>; group++) {
        const Scales s = Scheme::plane_scales(panel, plane, group);
        for (int i = group * kGroupK; i < (group + 1) * kGroupK; i++) {
            F32x16 weight = F32x16::load(out + i * kPanelRows) * s.scale;
            if (Scheme::kHasMinimum) weight = weight + s.minimum;
            weight.store(out + i * kPanelRows);
        }
    }
}

}  // namespace castiron
