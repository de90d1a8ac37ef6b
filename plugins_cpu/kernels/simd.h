// 16 float lanes as one value, whatever the level has: one AVX-512 register, two AVX2 registers, or a plain
// array the compiler vectorises. Every operation is lane by lane, so a kernel written with F32x16 adds in the
// same order on every level; only fma() differs (generic: product rounded, then added).
// For kernels over panels of 16 weight rows (linear, embedding); float_vector.h has the level's own width.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC's own headers (bug 105593)
#endif

namespace castiron {

constexpr int kLanes = 16;

inline float f32_from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline uint32_t bits_from_f32(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// IEEE half to float, exact, subnormals, infinities and NaN included.
inline float f32_from_f16(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fffu) << 13;
    const uint32_t special = (half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;  // exponent of inf and NaN
    const float scaled = f32_from_bits(magnitude) * 5.192296858534828e33f;    // 2^112 rebiases the exponent
    return f32_from_bits(bits_from_f32(scaled) | special | sign);
}
inline float f32_from_bf16(uint16_t bits) { return f32_from_bits(static_cast<uint32_t>(bits) << 16); }

inline void prefetch(const void *address) {
#if defined(__GNUC__)
    __builtin_prefetch(address);
#else
    (void)address;
#endif
}

#if defined(__AVX512F__)

struct F32x16 {
    __m512 v;
    static F32x16 zero() { return {_mm512_setzero_ps()}; }
    static F32x16 broadcast(float value) { return {_mm512_set1_ps(value)}; }
    static F32x16 load(const float *p) { return {_mm512_loadu_ps(p)}; }
    static F32x16 load_f16(const uint16_t *p) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
    }
    static F32x16 load_bf16(const uint16_t *p) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
    }
    static F32x16 load_u8(const uint8_t *p) {
        return {
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))))};
    }
    static F32x16 load_i8(const int8_t *p) {
        return {
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))))};
    }
    void store(float *p) const { _mm512_storeu_ps(p, v); }
};
inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }

#elif defined(__AVX2__)

struct F32x16 {
    __m256 lo, hi;
    static F32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static F32x16 broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
    static F32x16 load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static F32x16 load_f16(const uint16_t *p) {
        return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))),
                _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 8)))};
    }
    static F32x16 load_bf16(const uint16_t *p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
    static F32x16 load_u8(const uint8_t *p) {
        return {
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)))),
            _mm256_cvtepi32_ps(
                _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p + 8))))};
    }
    static F32x16 load_i8(const int8_t *p) {
        return {
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)))),
            _mm256_cvtepi32_ps(
                _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p + 8))))};
    }
    void store(float *p) const {
        _mm256_storeu_ps(p, lo);
        _mm256_storeu_ps(p + 8, hi);
    }

  private:
    static __m256 widen_bf16(const uint16_t *p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
};
inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }

#else

struct F32x16 {
    float v[kLanes];

    // make(f) has lane i = f(i); every operation below is written with it
    template <typename F>
    static F32x16 make(F lane) {
        F32x16 result;
        for (int i = 0; i < kLanes; i++) result.v[i] = lane(i);
        return result;
    }
    static F32x16 zero() { return broadcast(0.0f); }
    static F32x16 broadcast(float value) {
        return make([=](int) { return value; });
    }
    static F32x16 load(const float *p) {
        return make([=](int i) { return p[i]; });
    }
    static F32x16 load_f16(const uint16_t *p) {
        return make([=](int i) { return f32_from_f16(p[i]); });
    }
    static F32x16 load_bf16(const uint16_t *p) {
        return make([=](int i) { return f32_from_bf16(p[i]); });
    }
    static F32x16 load_u8(const uint8_t *p) {
        return make([=](int i) { return static_cast<float>(p[i]); });
    }
    static F32x16 load_i8(const int8_t *p) {
        return make([=](int i) { return static_cast<float>(p[i]); });
    }
    void store(float *p) const {
        for (int i = 0; i < kLanes; i++) p[i] = v[i];
    }
};
inline F32x16 operator+(const F32x16 &a, const F32x16 &b) {
    return F32x16::make([&](int i) { return a.v[i] + b.v[i]; });
}
inline F32x16 operator-(const F32x16 &a, const F32x16 &b) {
    return F32x16::make([&](int i) { return a.v[i] - b.v[i]; });
}
inline F32x16 operator*(const F32x16 &a, const F32x16 &b) {
    return F32x16::make([&](int i) { return a.v[i] * b.v[i]; });
}
inline F32x16 fma(const F32x16 &a, const F32x16 &b, const F32x16 &c) {
    return F32x16::make([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline F32x16 max(const F32x16 &a, const F32x16 &b) {
    return F32x16::make([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}

#endif

// 16 pairs of bf16, the first of each in the low half of 32 bits.
inline void load_bf16_pairs(const uint32_t *p, F32x16 *first, F32x16 *second) {
#if defined(__AVX512F__)
    const __m512i pairs = _mm512_loadu_si512(p);
    first->v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    second->v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)));
#elif defined(__AVX2__)
    const __m256i high = _mm256_set1_epi32(-65536);
    const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + 8));
    *first = {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
    *second = {_mm256_castsi256_ps(_mm256_and_si256(lo, high)),
               _mm256_castsi256_ps(_mm256_and_si256(hi, high))};
#else
    for (int i = 0; i < kLanes; i++) {
        first->v[i] = f32_from_bits(p[i] << 16);
        second->v[i] = f32_from_bits(p[i] & 0xffff0000u);
    }
#endif
}

// The first `count` lanes (1 .. 16) from or to memory; nothing beyond them is read or written.
inline F32x16 load_partial(const float *p, int64_t count) {
    if (count >= kLanes) return F32x16::load(p);
    float lanes[kLanes] = {};
    for (int64_t i = 0; i < count; i++) lanes[i] = p[i];
    return F32x16::load(lanes);
}
inline void store_partial(F32x16 value, float *p, int64_t count) {
    if (count >= kLanes) return value.store(p);
    float lanes[kLanes];
    value.store(lanes);
    for (int64_t i = 0; i < count; i++) p[i] = lanes[i];
}

// Reductions in one fixed order on every level: lane i with i + 8, then + 4, + 2, + 1.
inline float reduce_add(F32x16 value) {
    float lanes[kLanes];
    value.store(lanes);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}
inline float reduce_max(F32x16 value) {
    float lanes[kLanes];
    value.store(lanes);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}

}  // namespace castiron
