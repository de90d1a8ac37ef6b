// Exact integer dot products of int8 activations with the codes of 32 k (or a scale group of them) of 16
// weight rows, one implementation a level: AVX-512 VNNI, AVX2, or floats (integers below 2^24, so exact as
// well).
#pragma once
#include "scheme_blocks.h"
#include "simd.h"

#if defined(__GNUC__)
#define CASTIRON_INLINE inline __attribute__((always_inline))
#define CASTIRON_UNROLL _Pragma("GCC unroll 8")
#else
#define CASTIRON_INLINE inline
#define CASTIRON_UNROLL
#endif

namespace castiron {

inline int32_t load_i32(const int8_t *p) {
    int32_t value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

// dot_products<bits, packed, rows>(codes, group, q, q_stride, q_sums, q_sums_stride, dots):
//   dots[i] = sum over the group's k of q[i * q_stride + k] * code[k], for 16 weight rows
//   codes    packed planes, or what expand_q8_codes made of them
//   q_sums   q_sums[i * q_sums_stride] = sum of row i's 32 q; read only where kNeedsQ8Sums<bits>

#if defined(__AVX512VNNI__)

constexpr bool kReadsPackedQ8 = true;
using Q8Code = uint8_t;
constexpr int64_t kTileRowsQ8 = 8;  // of two digits each
// vpdpbusd wants unsigned weights: 8-bit codes get 128 added, and 128 * sum(q) taken from the dot product
template <int bits>
constexpr bool kNeedsQ8Sums = bits == 8;
constexpr int32_t kByteOffset = 128;

template <int bits>
inline void expand_q8_codes(const uint8_t *planes, uint8_t *out) {
    expand_codes<bits>(planes, out);
    if (bits == 8)
        for (int i = 0; i < kPlaneGroups * kGroupBytes; i++) out[i] ^= 0x80;
}

template <int bits, bool packed>
CASTIRON_INLINE __m512i load_codes(const uint8_t *codes, int group) {
    if constexpr (!packed) return _mm512_loadu_si512(codes + group * kGroupBytes);
    if constexpr (bits == 8)
        return _mm512_xor_si512(_mm512_loadu_si512(codes + group * kGroupBytes),
                                _mm512_set1_epi8(static_cast<char>(0x80)));
    const __m512i nibbles = _mm512_loadu_si512(codes + group % 4 * kGroupBytes);
    const __m512i low =
        _mm512_and_si512(group < 4 ? nibbles : _mm512_srli_epi16(nibbles, 4), _mm512_set1_epi8(15));
    const uint8_t *high_plane = codes + 4 * kGroupBytes;
    if constexpr (bits == 5) {
        const __m512i high = _mm512_loadu_si512(high_plane);
        const __m512i moved = group <= 4 ? _mm512_slli_epi16(high, static_cast<unsigned>(4 - group))
                                         : _mm512_srli_epi16(high, static_cast<unsigned>(group - 4));
        return _mm512_or_si512(low, _mm512_and_si512(moved, _mm512_set1_epi8(0x10)));
    }
    if constexpr (bits == 6) {
        const __m512i high = _mm512_loadu_si512(high_plane + group / 4 * kGroupBytes);
        const int field = group % 4;
        const __m512i moved = field <= 2 ? _mm512_slli_epi16(high, static_cast<unsigned>(4 - 2 * field))
                                         : _mm512_srli_epi16(high, 2);
        return _mm512_or_si512(low, _mm512_and_si512(moved, _mm512_set1_epi8(0x30)));
    }
    return low;
}

template <int bits, bool packed, int rows>
CASTIRON_INLINE void dot_products(const uint8_t *codes, int group, const int8_t *q, int64_t q_stride,
                                  const int32_t *q_sums, int64_t q_sums_stride, F32x16 *dots) {
    constexpr int kNum = kPlaneGroups / kScaleGroups<bits>;
    __m512i sums[rows];
    for (int i = 0; i < rows; i++)
        sums[i] = kNeedsQ8Sums<bits> ? _mm512_set1_epi32(-kByteOffset * q_sums[i * q_sums_stride])
                                     : _mm512_setzero_si512();
    CASTIRON_UNROLL
    for (int g = 0; g < kNum; g++) {
        const int k_group = group * kNum + g;
        const __m512i weight = load_codes<bits, packed>(codes, k_group);
        for (int i = 0; i < rows; i++)
            sums[i] = _mm512_dpbusd_epi32(sums[i], weight,
                                          _mm512_set1_epi32(load_i32(q + i * q_stride + k_group * 4)));
    }
    for (int i = 0; i < rows; i++) dots[i].v = _mm512_cvtepi32_ps(sums[i]);
}

#elif defined(__AVX2__) && !defined(__AVX512F__)

constexpr bool kReadsPackedQ8 = true;
using Q8Code = uint8_t;
constexpr int64_t kTileRowsQ8 = 2;  // of two digits each
template <int bits>
constexpr bool kNeedsQ8Sums = false;

template <int bits>
inline void expand_q8_codes(const uint8_t *planes, uint8_t *out) {
    expand_codes<bits>(planes, out);
}

inline __m256i load_bytes(const uint8_t *p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
}

// 8 rows (the half-th of 16) x 4 k.
template <int bits, bool packed>
CASTIRON_INLINE __m256i load_codes(const uint8_t *codes, int group, int half) {
    codes += half * 32;
    if constexpr (!packed || bits == 8) return load_bytes(codes + group * kGroupBytes);
    const __m256i nibbles = load_bytes(codes + group % 4 * kGroupBytes);
    const __m256i low =
        _mm256_and_si256(group < 4 ? nibbles : _mm256_srli_epi16(nibbles, 4), _mm256_set1_epi8(15));
    const uint8_t *high_plane = codes + 4 * kGroupBytes;
    if constexpr (bits == 5) {
        const __m256i high = load_bytes(high_plane);
        const __m256i moved =
            group <= 4 ? _mm256_slli_epi16(high, 4 - group) : _mm256_srli_epi16(high, group - 4);
        return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(0x10)));
    }
    if constexpr (bits == 6) {
        const __m256i high = load_bytes(high_plane + group / 4 * kGroupBytes);
        const int field = group % 4;
        const __m256i moved =
            field <= 2 ? _mm256_slli_epi16(high, 4 - 2 * field) : _mm256_srli_epi16(high, 2);
        return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(0x30)));
    }
    return low;
}

// Groups whose pair sums of code * q, at most 2 * max code * 127 each, add up without leaving int16.
template <int bits>
constexpr int kGroupsInInt16 = bits == 4   ? 8
                               : bits == 5 ? 4
                               : bits == 6 ? 2
                                           : 1;
static_assert(8 * 2 * 15 * 127 < 32768 && 4 * 2 * 31 * 127 < 32768 && 2 * 2 * 63 * 127 < 32768 &&
              2 * 128 * 127 < 32768);

template <int bits, bool packed, int rows>
CASTIRON_INLINE void dot_products(const uint8_t *codes, int group, const int8_t *q, int64_t q_stride,
                                  const int32_t *, int64_t, F32x16 *dots) {
    constexpr int kNum = kPlaneGroups / kScaleGroups<bits>, kStep = kGroupsInInt16<bits>;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sums[rows][2];
    CASTIRON_UNROLL
    for (int start = 0; start < kNum; start += kStep) {
        __m256i pairs[rows][2];
        CASTIRON_UNROLL
        for (int g = start; g < start + kStep; g++) {
            const int k_group = group * kNum + g;
            __m256i weight[2], magnitude[2];
            for (int half = 0; half < 2; half++) {
                weight[half] = load_codes<bits, packed>(codes, k_group, half);
                if (bits == 8) magnitude[half] = _mm256_abs_epi8(weight[half]);
            }
            for (int i = 0; i < rows; i++) {
                const __m256i x = _mm256_set1_epi32(load_i32(q + i * q_stride + k_group * 4));
                for (int half = 0; half < 2; half++) {
                    // vpmaddubsw wants unsigned codes: signed ones give their sign to the activations
                    const __m256i products =
                        bits == 8 ? _mm256_maddubs_epi16(magnitude[half], _mm256_sign_epi8(x, weight[half]))
                                  : _mm256_maddubs_epi16(weight[half], x);
                    pairs[i][half] = g == start ? products : _mm256_add_epi16(pairs[i][half], products);
                }
            }
        }
        for (int i = 0; i < rows; i++) {
            for (int half = 0; half < 2; half++) {
                const __m256i sum = _mm256_madd_epi16(pairs[i][half], ones);
                sums[i][half] = start == 0 ? sum : _mm256_add_epi32(sums[i][half], sum);
            }
        }
    }
    for (int i = 0; i < rows; i++) dots[i] = {_mm256_cvtepi32_ps(sums[i][0]), _mm256_cvtepi32_ps(sums[i][1])};
}

#else

constexpr bool kReadsPackedQ8 = false;
using Q8Code = float;
constexpr int64_t kTileRowsQ8 = 1;
template <int bits>
constexpr bool kNeedsQ8Sums = false;

template <int bits>
inline void expand_q8_codes(const uint8_t *planes, float *out) {
    uint8_t codes[kPlaneGroups * kGroupBytes];
    expand_codes<bits>(planes, codes);
    widen_codes<bits>(codes, out);
}

// dot product at most 32 * 128 * 127 < 2^24
template <int bits, bool packed, int rows>
CASTIRON_INLINE void dot_products(const float *codes, int group, const int8_t *q, int64_t q_stride,
                                  const int32_t *, int64_t, F32x16 *dots) {
    static_assert(!packed);
    constexpr int kNumK = kPlaneK / kScaleGroups<bits>;
    for (int i = 0; i < rows; i++) dots[i] = F32x16::zero();
    for (int k = group * kNumK; k < (group + 1) * kNumK; k++) {
        const F32x16 weight = F32x16::load(codes + k * kPanelRows);
        for (int i = 0; i < rows; i++)
            dots[i] = fma(F32x16::broadcast(static_cast<float>(q[i * q_stride + k])), weight, dots[i]);
    }
}

#endif

}  // namespace castiron
