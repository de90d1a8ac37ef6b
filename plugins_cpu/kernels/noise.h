// Sampling noise: a counter-based generator, so that the noise of a token depends on nothing but the
// request's seed, the position of the token in the output and the token's id. Every device computes the same:
//
//   Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
//     key      (low 32 bits of seed, high 32 bits of seed)
//     counter  (token_id / 4, output_position, 0, 0)
//     word     output word token_id % 4
//   uniform    u = ((word >> 9) + 0.5) / 2^23, exact in float, 0 < u < 1
//   noise      -log(-log(u)), Gumbel distributed
//
// A token sampled is the one with the largest scaled logit + noise, the lowest id if several have it.
#pragma once
#include <cstdint>

#include "float_vector.h"

namespace castiron {

constexpr int kNoiseTokens = 32;  // made at once

namespace philox {
constexpr uint32_t kMultiply0 = 0xD2511F53, kMultiply1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
constexpr int kRounds = 10;

// words[i] belongs to token first_token + i; first_token is a multiple of 4.
#if defined(__AVX2__)
inline void multiply(__m256i a, uint32_t factor, __m256i *high, __m256i *low) {
    const __m256i f = _mm256_set1_epi32(static_cast<int32_t>(factor));
    const __m256i even = _mm256_mul_epu32(a, f), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), f);
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}

inline void fill_words(uint64_t seed, uint32_t output_position, uint32_t first_token,
                       uint32_t words[kNoiseTokens]) {
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    __m256i c0 = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int32_t>(first_token / 4)),
                                  _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    __m256i c1 = _mm256_set1_epi32(static_cast<int32_t>(output_position));
    __m256i c2 = _mm256_setzero_si256(), c3 = _mm256_setzero_si256();
    for (int round = 0; round < kRounds; ++round) {
        __m256i high0, low0, high1, low1;
        multiply(c0, kMultiply0, &high0, &low0);
        multiply(c2, kMultiply1, &high1, &low1);
        c0 = _mm256_xor_si256(_mm256_xor_si256(high1, c1), _mm256_set1_epi32(static_cast<int32_t>(key0)));
        c2 = _mm256_xor_si256(_mm256_xor_si256(high0, c3), _mm256_set1_epi32(static_cast<int32_t>(key1)));
        c1 = low1;
        c3 = low0;
        key0 += kWeyl0;
        key1 += kWeyl1;
    }
    // lane i of c0..c3 holds the words of tokens 4 i .. 4 i + 3
    const __m256i a = _mm256_unpacklo_epi32(c0, c1), b = _mm256_unpackhi_epi32(c0, c1);
    const __m256i c = _mm256_unpacklo_epi32(c2, c3), d = _mm256_unpackhi_epi32(c2, c3);
    const __m256i pairs[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c),
                              _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)};
    for (int i = 0; i < 2; ++i) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(words + 8 * i),
                            _mm256_permute2x128_si256(pairs[2 * i], pairs[2 * i + 1], 0x20));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(words + 16 + 8 * i),
                            _mm256_permute2x128_si256(pairs[2 * i], pairs[2 * i + 1], 0x31));
    }
}
#else
inline void fill_words(uint64_t seed, uint32_t output_position, uint32_t first_token,
                       uint32_t words[kNoiseTokens]) {
    for (int i = 0; i < kNoiseTokens; i += 4) {
        uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
        uint32_t c[4] = {(first_token + static_cast<uint32_t>(i)) / 4, output_position, 0, 0};
        for (int round = 0; round < kRounds; ++round) {
            const uint64_t product0 = static_cast<uint64_t>(c[0]) * kMultiply0;
            const uint64_t product1 = static_cast<uint64_t>(c[2]) * kMultiply1;
            c[0] = static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ key0;
            c[2] = static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ key1;
            c[1] = static_cast<uint32_t>(product1);
            c[3] = static_cast<uint32_t>(product0);
            key0 += kWeyl0;
            key1 += kWeyl1;
        }
        for (int w = 0; w < 4; ++w) words[i + w] = c[w];
    }
}
#endif
}  // namespace philox

// noise[i] of token first_token + i, for kNoiseTokens tokens; first_token is a multiple of 4.
inline void fill_noise(uint64_t seed, uint32_t output_position, uint32_t first_token, float *noise) {
    uint32_t words[kNoiseTokens];
    philox::fill_words(seed, output_position, first_token, words);
    for (int i = 0; i < kNoiseTokens; i += kVecLanes) {
        float bits[kVecLanes];
        std::memcpy(bits, words + i, sizeof(bits));
        // 23 bits under the exponent of 2^23 are a float 2^23 + bits
        const Vec whole = or_int(and_int(shift_right<9>(load(bits)), 0x007FFFFF), 0x4B000000);
        const Vec uniform = (whole - splat(8388608.0f) + splat(0.5f)) * splat(1.0f / 8388608.0f);
        const Vec exponential = splat(0.0f) - log(uniform);
        store(noise + i, splat(0.0f) - log(exponential));
    }
}

}  // namespace castiron
