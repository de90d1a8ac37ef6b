// Float vectors of the level's width, and the functions on them that kernels share. Every operation works
// lane by lane, so an element's result doesn't depend on where in a row or in which tail it stands.
// For element-wise, attention and sampling kernels; simd.h is for kernels over panels of 16 weight rows.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Before a loop of constant length whose body indexes an array of vectors: unrolled early enough that the
// array stays in registers.
#if defined(__clang__)
#define CASTIRON_UNROLL _Pragma("unroll")
#else
#define CASTIRON_UNROLL _Pragma("GCC unroll 16")
#endif

namespace castiron {

inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// IEEE half precision in software, round to nearest even.
inline float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7FFF;
    if (magnitude >= 0x7C00) return bits_to_float(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    if (magnitude >= 0x0400) return bits_to_float(sign | ((magnitude << 13) + 0x38000000));
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;  // subnormal: steps of 2^-24
    return sign ? -value : value;
}
inline uint16_t float_to_half(float value) {
    const uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00 | (magnitude >> 13 & 0x1FF));
    if (magnitude >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);
    if (magnitude <
        0x38800000) {  // subnormal half: adding 0.5 leaves the rounded steps of 2^-24 in the low bits
        const float shifted = bits_to_float(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3F000000));
    }
    const uint32_t rounded = magnitude + 0xFFF + (magnitude >> 13 & 1);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

// Vec: kVecLanes floats. Mask: one truth value a lane.
#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

constexpr int kVecLanes = 16;
struct Vec {
    __m512 v;
};
using Mask = __mmask16;

inline Vec splat(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline void store(float *p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Mask first_lanes(int n) { return static_cast<Mask>(n >= 16 ? 0xFFFF : (1u << n) - 1); }
inline Vec load_first(const float *p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void store_first(float *p, Vec a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
inline Vec load_half(const uint16_t *p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
}
inline void store_half(uint16_t *p, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }  // b where either is NaN
inline Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
inline Mask greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
inline Mask equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
inline uint32_t lane_bits(Mask m) { return m; }  // bit i = lane i
inline Vec select(Mask m, Vec yes, Vec no) { return {_mm512_mask_blend_ps(m, no.v, yes.v)}; }
// integer views of the lanes
inline Vec add_int(Vec a, int32_t b) {
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_set1_epi32(b)))};
}
inline Vec sub_int(Vec a, Vec b) {
    return {_mm512_castsi512_ps(_mm512_sub_epi32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
}
inline Vec and_int(Vec a, uint32_t b) {
    return {_mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(static_cast<int32_t>(b))))};
}
inline Vec or_int(Vec a, uint32_t b) {
    return {_mm512_castsi512_ps(
        _mm512_or_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(static_cast<int32_t>(b))))};
}
template <int n>
inline Vec shift_left(Vec a) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.v), n))};
}
template <int n>
inline Vec shift_right(Vec a) {  // with the sign
    return {_mm512_castsi512_ps(_mm512_srai_epi32(_mm512_castps_si512(a.v), n))};
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

constexpr int kVecLanes = 8;
struct Vec {
    __m256 v;
};
struct Mask {
    __m256 v;
};

inline Vec splat(float x) { return {_mm256_set1_ps(x)}; }
inline Vec load(const float *p) { return {_mm256_loadu_ps(p)}; }
inline void store(float *p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline Mask first_lanes(int n) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane))};
}
inline Vec load_first(const float *p, int n) {
    return {_mm256_maskload_ps(p, _mm256_castps_si256(first_lanes(n).v))};
}
inline void store_first(float *p, Vec a, int n) {
    _mm256_maskstore_ps(p, _mm256_castps_si256(first_lanes(n).v), a.v);
}
inline Vec load_half(const uint16_t *p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))};
}
inline void store_half(uint16_t *p, Vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }  // b where either is NaN
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }  // b where either is NaN
inline Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline Mask greater(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)}; }
inline Mask equal(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)}; }
inline uint32_t lane_bits(Mask m) { return static_cast<uint32_t>(_mm256_movemask_ps(m.v)); }
inline Vec select(Mask m, Vec yes, Vec no) { return {_mm256_blendv_ps(no.v, yes.v, m.v)}; }
// integer views of the lanes
inline Vec add_int(Vec a, int32_t b) {
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.v), _mm256_set1_epi32(b)))};
}
inline Vec sub_int(Vec a, Vec b) {
    return {_mm256_castsi256_ps(_mm256_sub_epi32(_mm256_castps_si256(a.v), _mm256_castps_si256(b.v)))};
}
inline Vec and_int(Vec a, uint32_t b) { return {_mm256_and_ps(a.v, _mm256_set1_ps(bits_to_float(b)))}; }
inline Vec or_int(Vec a, uint32_t b) { return {_mm256_or_ps(a.v, _mm256_set1_ps(bits_to_float(b)))}; }
template <int n>
inline Vec shift_left(Vec a) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a.v), n))};
}
template <int n>
inline Vec shift_right(Vec a) {  // with the sign
    return {_mm256_castsi256_ps(_mm256_srai_epi32(_mm256_castps_si256(a.v), n))};
}

#else  // any processor: the compiler's own vectors of four

constexpr int kVecLanes = 4;
typedef float RawFloats __attribute__((vector_size(16)));
typedef int32_t RawInts __attribute__((vector_size(16)));
struct Vec {
    RawFloats v;
};
struct Mask {
    RawInts v;  // -1 or 0
};

inline RawInts as_ints(RawFloats a) {
    RawInts r;
    std::memcpy(&r, &a, 16);
    return r;
}
inline RawFloats as_floats(RawInts a) {
    RawFloats r;
    std::memcpy(&r, &a, 16);
    return r;
}
inline Vec splat(float x) { return {RawFloats{x, x, x, x}}; }
inline Vec load(const float *p) {
    Vec r;
    std::memcpy(&r.v, p, 16);
    return r;
}
inline void store(float *p, Vec a) { std::memcpy(p, &a.v, 16); }
inline Mask first_lanes(int n) { return {RawInts{n, n, n, n} > RawInts{0, 1, 2, 3}}; }
inline Vec load_first(const float *p, int n) {
    Vec r = splat(0);
    for (int i = 0; i < n && i < 4; ++i) r.v[i] = p[i];
    return r;
}
inline void store_first(float *p, Vec a, int n) {
    for (int i = 0; i < n && i < 4; ++i) p[i] = a.v[i];
}
inline Vec load_half(const uint16_t *p) {
    return {RawFloats{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])}};
}
inline void store_half(uint16_t *p, Vec a) {
    for (int i = 0; i < 4; ++i) p[i] = float_to_half(a.v[i]);
}
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
inline Mask greater(Vec a, Vec b) { return {a.v > b.v}; }
inline Mask equal(Vec a, Vec b) { return {a.v == b.v}; }
inline uint32_t lane_bits(Mask m) { return (m.v[0] & 1) | (m.v[1] & 2) | (m.v[2] & 4) | (m.v[3] & 8); }
inline Vec select(Mask m, Vec yes, Vec no) {
    return {as_floats((m.v & as_ints(yes.v)) | (~m.v & as_ints(no.v)))};
}
inline Vec max(Vec a, Vec b) { return select(greater(a, b), a, b); }  // b where either is NaN
inline Vec min(Vec a, Vec b) { return select(greater(b, a), a, b); }  // b where either is NaN
inline Vec abs(Vec a) { return {as_floats(as_ints(a.v) & 0x7FFFFFFF)}; }
// integer views of the lanes
inline Vec add_int(Vec a, int32_t b) { return {as_floats(as_ints(a.v) + b)}; }
inline Vec sub_int(Vec a, Vec b) { return {as_floats(as_ints(a.v) - as_ints(b.v))}; }
inline Vec and_int(Vec a, uint32_t b) { return {as_floats(as_ints(a.v) & static_cast<int32_t>(b))}; }
inline Vec or_int(Vec a, uint32_t b) { return {as_floats(as_ints(a.v) | static_cast<int32_t>(b))}; }
template <int n>
inline Vec shift_left(Vec a) {
    return {as_floats(as_ints(a.v) << n)};
}
template <int n>
inline Vec shift_right(Vec a) {  // with the sign
    return {as_floats(as_ints(a.v) >> n)};
}

#endif

inline Vec &operator+=(Vec &a, Vec b) { return a = a + b; }

// Sum and largest of the lanes, in a fixed order: halves are folded together.
#if defined(__AVX2__)
template <typename F>
float fold_eight(__m256 a, F fn) {
    __m128 b = fn(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = fn(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(fn(b, _mm_shuffle_ps(b, b, 1)));
}
#if defined(__AVX512F__)
inline __m256 low_half(Vec a) { return _mm512_castps512_ps256(a.v); }
inline __m256 high_half(Vec a) { return _mm512_extractf32x8_ps(a.v, 1); }
inline __m256 sum_halves(Vec a) { return _mm256_add_ps(low_half(a), high_half(a)); }
inline __m256 max_halves(Vec a) { return _mm256_max_ps(low_half(a), high_half(a)); }
#else
inline __m256 sum_halves(Vec a) { return a.v; }
inline __m256 max_halves(Vec a) { return a.v; }
#endif
inline float sum_lanes(Vec a) {
    return fold_eight(sum_halves(a), [](__m128 x, __m128 y) { return _mm_add_ps(x, y); });
}
inline float max_lanes(Vec a) {
    return fold_eight(max_halves(a), [](__m128 x, __m128 y) { return _mm_max_ps(x, y); });
}
#else
inline float sum_lanes(Vec a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
inline float max_lanes(Vec a) {
    const float first = a.v[0] > a.v[2] ? a.v[0] : a.v[2], second = a.v[1] > a.v[3] ? a.v[1] : a.v[3];
    return first > second ? first : second;
}
#endif

constexpr float kRoundingShift =
    12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits

// e^x within 2 ulp; 0 below -104, infinity above 88.8, NaN stays. Range reduction by multiples of ln 2 and
// the polynomial of Cephes expf (S. Moshier).
inline Vec exp(Vec x) {
    x = max(splat(-105.0f), min(splat(89.0f), x));
    const Vec shifted = fma(x, splat(1.44269504088896341f), splat(kRoundingShift));
    const Vec n = shifted - splat(kRoundingShift);
    Vec r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    Vec p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
    // 2^n in two steps, so that neither leaves the range of a normal float
    const Vec whole = add_int(shifted, -0x4B400000);
    const Vec half = shift_right<1>(whole);
    const Vec first = shift_left<23>(add_int(half, 127));
    const Vec second = shift_left<23>(add_int(sub_int(whole, half), 127));
    return p * first * second;
}

// Natural logarithm of a positive normal number, within 2 ulp also near 1; polynomial of Cephes logf.
inline Vec log(Vec x) {
    // x = 2^n * m with m in [sqrt(1/2), sqrt(2))
    const Vec offset = add_int(x, -0x3F3504F3);
    const Vec exponent = shift_right<23>(offset);
    const Vec m = add_int(and_int(offset, 0x007FFFFF), 0x3F3504F3);
    const Vec n = add_int(exponent, 0x4B400000) - splat(kRoundingShift);
    const Vec f = m - splat(1.0f), square = f * f;
    Vec p = splat(7.0376836292e-2f);
    p = fma(p, f, splat(-1.1514610310e-1f));
    p = fma(p, f, splat(1.1676998740e-1f));
    p = fma(p, f, splat(-1.2420140846e-1f));
    p = fma(p, f, splat(1.4249322787e-1f));
    p = fma(p, f, splat(-1.6668057665e-1f));
    p = fma(p, f, splat(2.0000714765e-1f));
    p = fma(p, f, splat(-2.4999993993e-1f));
    p = fma(p, f, splat(3.3333331174e-1f));
    p = p * f * square;
    p = fma(n, splat(-2.12194440e-4f), p);
    p = fma(square, splat(-0.5f), p);
    return fma(n, splat(0.693359375f), f + p);
}

inline Vec silu(Vec x) { return x / (splat(1.0f) + exp(splat(0.0f) - x)); }

// One element of a cache: float, or IEEE half kept as its bits.
inline float load_element(const float *p) { return *p; }
inline float load_element(const uint16_t *p) { return half_to_float(*p); }
inline void store_element(float *p, float value) { *p = value; }
inline void store_element(uint16_t *p, float value) { *p = float_to_half(value); }
inline Vec load_elements(const float *p) { return load(p); }
inline Vec load_elements(const uint16_t *p) { return load_half(p); }
inline void store_elements(float *p, Vec a) { store(p, a); }
inline void store_elements(uint16_t *p, Vec a) { store_half(p, a); }

}  // namespace castiron
