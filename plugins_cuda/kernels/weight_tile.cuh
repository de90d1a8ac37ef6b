// Reads tiles of the m64 weight layout (plugins_cuda/layouts.py describes its bytes), for the scheme that
// -DSCHEME=SCHEME_... chooses. A tile is 64 rows x kUnit columns and lies in global or shared memory, aligned
// to 16 bytes. A fragment (panel 0..3, step) is the A operand of mma.m16n8k16: rows 16 panel.., columns 16
// step.. of the tile; lane 4g + t holds rows g and g + 8.
//   load_fragments  the dequantized weights, rounded once to bf16, times kFragmentScale
//   load_codes      only the codes, kCodeBias + q, exact in bf16; w = scale * q + minimum with
//   group_scale     (scale, minimum) of a row and a group of kGroup columns
//   load_element    one weight in f32, exactly the checkpoint's
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

#define SCHEME_BF16 0
#define SCHEME_Q4_0 1
#define SCHEME_Q4_1 2
#define SCHEME_Q5_0 3
#define SCHEME_Q5_1 4
#define SCHEME_Q8_0 5
#define SCHEME_Q4_K 6
#define SCHEME_Q5_K 7
#define SCHEME_Q6_K 8
#define SCHEME_INT4_G32 9
#define SCHEME_INT4_G64 10
#define SCHEME_INT4_G128 11
#define SCHEME_INT4_G32Z 12
#define SCHEME_INT4_G64Z 13
#define SCHEME_INT4_G128Z 14
#define SCHEME_FP8 15  // read as a whole: its tiles are images for matrix instructions

namespace castiron {

constexpr int kScheme = SCHEME;
constexpr bool kIsKQuant = kScheme >= SCHEME_Q4_K && kScheme <= SCHEME_Q6_K;
constexpr bool kIsFp8 = kScheme == SCHEME_FP8;
constexpr bool kIsInt4 = kScheme >= SCHEME_INT4_G32 && !kIsFp8;  // bf16 scales
// a group's; its minimum is -scale * zero point
constexpr bool kHasZeroPoints = kScheme >= SCHEME_INT4_G32Z && !kIsFp8;
constexpr bool kHasMinimum = kScheme == SCHEME_Q4_1 || kScheme == SCHEME_Q5_1 || kScheme == SCHEME_Q4_K ||
                             kScheme == SCHEME_Q5_K || kHasZeroPoints;
constexpr int kTileRows = 64;
// columns that share a scale
constexpr int kGroup = kScheme == SCHEME_Q6_K                                        ? 16
                       : kScheme == SCHEME_INT4_G64 || kScheme == SCHEME_INT4_G64Z   ? 64
                       : kScheme == SCHEME_INT4_G128 || kScheme == SCHEME_INT4_G128Z ? 128
                                                                                     : 32;
constexpr int kUnit = kIsKQuant ? 256 : kIsFp8 ? 128 : kGroup > 64 ? kGroup : 64;  // columns of a tile
constexpr int kParts = kUnit / 64;                          // runs of 64 columns, 4 steps each
constexpr int kPartGroups = kGroup < 64 ? 64 / kGroup : 1;  // whose scales a run needs
constexpr int kPartGroup = 64 / kPartGroups;                // columns of it that share one
constexpr int kZeroPoint = kScheme == SCHEME_Q4_0 || (kIsInt4 && !kHasZeroPoints) ? 8
                           : kScheme == SCHEME_Q5_0                               ? 16
                           : kScheme == SCHEME_Q6_K                               ? 32
                                                                                  : 0;
constexpr int kHighBits = kScheme == SCHEME_Q5_0 || kScheme == SCHEME_Q5_1 || kScheme == SCHEME_Q5_K ? 1
                          : kScheme == SCHEME_Q6_K                                                   ? 2
                                                                                                     : 0;
constexpr int kHeaderBytes = kScheme == SCHEME_BF16   ? 0
                             : kIsFp8                 ? 0
                             : kScheme == SCHEME_Q6_K ? 128 + 16 * 64
                             : kIsKQuant              ? 256 + 12 * 64
                             : kIsInt4                ? kUnit / kGroup * 64 * (kHasZeroPoints ? 3 : 2)
                             : kScheme == SCHEME_Q4_1 || kScheme == SCHEME_Q5_1 ? 512
                                                                                : 256;
constexpr int kCodeBytes = kScheme == SCHEME_BF16   ? 8192
                           : kScheme == SCHEME_Q8_0 ? 4096
                           : kIsFp8                 ? 4096
                                                    : 2048;  // of 64 columns
constexpr int kHighOffset = kHeaderBytes + kParts * kCodeBytes;
constexpr int kTileBytes = kHighOffset + kParts * kHighBits * 512;

// The scales of an fp8 weight's rows, f32 [rows of whole tiles], behind its tiles of n rows and k columns.
__device__ __forceinline__ const float *row_scales(const void *weight, int n, int k) {
    const int64_t tiles = int64_t((n + kTileRows - 1) / kTileRows) * ((k + kUnit - 1) / kUnit);
    return reinterpret_cast<const float *>(static_cast<const uint8_t *>(weight) + tiles * kTileBytes);
}

// A bf16 of exponent 7 counts in ones: 0x4300 | q is 128 + q for q < 128.
constexpr int kCodeBias = kScheme == SCHEME_Q8_0 ? 0 : 128;

// The bits of 64 columns of a panel that a lane holds: 4 steps.
struct CodeWords {
    uint4 low;         // nibbles, a word per step; q8_0: steps 0 and 1
    uint4 more;        // q8_0: steps 2 and 3
    uint32_t high[2];  // 5-bit codes: a byte per step; 6-bit codes: 16 bits per step
};

// The word of step 0..3.
__device__ __forceinline__ uint32_t step_word(uint4 words, int step) {
    return step == 0 ? words.x : step == 1 ? words.y : step == 2 ? words.z : words.w;
}

__device__ __forceinline__ CodeWords load_code_words(const uint8_t *tile, int panel, int part, int lane) {
    CodeWords words = {};
    const uint8_t *codes = tile + kHeaderBytes + part * kCodeBytes;
    if constexpr (kScheme == SCHEME_Q8_0) {
        words.low = *reinterpret_cast<const uint4 *>(codes + panel * 1024 + lane * 16);
        words.more = *reinterpret_cast<const uint4 *>(codes + panel * 1024 + 512 + lane * 16);
    } else {
        words.low = *reinterpret_cast<const uint4 *>(codes + panel * 512 + lane * 16);
    }
    const int high_index = (part * 4 + panel) * 32 + lane;
    if constexpr (kHighBits == 1) {
        words.high[0] = *reinterpret_cast<const uint32_t *>(tile + kHighOffset + high_index * 4);
    }
    if constexpr (kHighBits == 2) {
        const uint2 high = *reinterpret_cast<const uint2 *>(tile + kHighOffset + high_index * 8);
        words.high[0] = high.x;
        words.high[1] = high.y;
    }
    return words;
}

// Before sm_90 the only arithmetic on bf16 pairs is fma, which rounds once as well: b * -1 + a, and a * b -
// 0.
__device__ __forceinline__ uint32_t subtract_bf16x2(uint32_t a, uint32_t b) {
    uint32_t difference;
#if __CUDA_ARCH__ >= 900
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(difference) : "r"(b), "r"(0xBF80BF80u), "r"(a));
#endif
    return difference;
}

__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
    uint32_t product;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
    return product;
}

// a * b + c, rounded once; subnormal numbers count.
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// a & mask | bits in one instruction, which the compiler misses for two constants.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(a), "r"(mask), "r"(bits));
    return result;
}

// `step` 0..3 of the 64 columns; a[i] = pair i of kCodeBias + q.
__device__ __forceinline__ void unpack_codes(const CodeWords &words, int step, uint32_t a[4]) {
    if constexpr (kScheme == SCHEME_Q8_0) {
        const uint4 half = step < 2 ? words.low : words.more;
        const uint32_t pairs[2] = {step % 2 == 0 ? half.x : half.z, step % 2 == 0 ? half.y : half.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Bytes lo, hi into the mantissas of 128s; the sign bit then stands for the exponent of 256.
            const uint32_t bits = __byte_perm(pairs[i / 2], 0x43434343u, i % 2 == 0 ? 0x4140 : 0x4342);
            a[i] = subtract_bf16x2(bits & 0xFF7FFF7Fu, bits & 0xFF80FF80u);
        }
    } else {
        const uint32_t low = step_word(words.low, step);
        uint32_t high = 0;  // bits kHighBits * i.. are of a_i.lo, 16 + kHighBits * i.. of a_i.hi
        if constexpr (kHighBits == 1) {
            high = words.high[0] >> (8 * step) & 0xFF;
            high |= high << 12;
        }
        if constexpr (kHighBits == 2) {
            high = words.high[step / 2] >> (16 * (step % 2)) & 0xFFFF;
            high |= high << 8;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (kHighBits == 0) {
                a[i] = and_or(low >> (4 * i), 0x000F000Fu, 0x43004300u);
            } else {
                a[i] = (low >> (4 * i) & 0x000F000Fu) | 0x43004300u;
            }
            if constexpr (kHighBits == 1) a[i] |= high << (4 - i) & 0x00100010u;
            if constexpr (kHighBits == 2) a[i] |= (i < 3 ? high << (4 - 2 * i) : high >> 2) & 0x00300030u;
        }
    }
}

__device__ __forceinline__ float half_at(const uint8_t *address) {
    return __half2float(*reinterpret_cast<const __half *>(address));
}

__device__ __forceinline__ float2 half_pair(uint32_t bits) {
    return {__half2float(__ushort_as_half(uint16_t(bits))),
            __half2float(__ushort_as_half(uint16_t(bits >> 16)))};
}

// scale and minimum of row 0..63 and group 0..kUnit / kGroup - 1 of a tile: w = scale * q + minimum.
__device__ __forceinline__ float2 group_scale(const uint8_t *tile, int row, int group) {
    if constexpr (kScheme == SCHEME_Q6_K) {
        const float scale =
            half_at(tile + row * 2) * float(reinterpret_cast<const int8_t *>(tile)[128 + group * 64 + row]);
        return {scale, -float(kZeroPoint) * scale};
    } else if constexpr (kIsKQuant) {  // 6-bit scale and minimum of 8 groups in 12 bytes
        const uint8_t *bytes = tile + 256 + row;
        uint32_t scale, minimum;
        if (group < 4) {
            scale = bytes[group * 64] & 63;
            minimum = bytes[(group + 4) * 64] & 63;
        } else {
            const uint32_t low = bytes[(group + 4) * 64];
            scale = (low & 15) | (bytes[(group - 4) * 64] >> 6) << 4;
            minimum = low >> 4 | (bytes[group * 64] >> 6) << 4;
        }
        return {half_at(tile + row * 2) * float(scale), -half_at(tile + 128 + row * 2) * float(minimum)};
    } else if constexpr (kScheme == SCHEME_BF16) {
        return {1.0f, 0.0f};
    } else if constexpr (kIsInt4) {
        const uint16_t bits = reinterpret_cast<const uint16_t *>(tile)[group * 64 + row];
        const float scale = __uint_as_float(uint32_t(bits) << 16);
        float zero_point = kZeroPoint;
        if constexpr (kHasZeroPoints) zero_point = tile[kUnit / kGroup * 128 + group * 64 + row];
        return {scale, -zero_point * scale};  // exact: 8 bits times 4
    } else {
        const float scale = half_at(tile + (group * 64 + row) * 2);
        if constexpr (kHasMinimum) return {scale, half_at(tile + 256 + (group * 64 + row) * 2)};
        return {scale, -float(kZeroPoint) * scale};
    }
}

// Of 64 columns (part of the tile) and rows g and g + 8 of a panel: scales[group][row]. All lanes of the warp
// call it: the 4 lanes that hold the same rows share the work of unpacking K-quants.
__device__ __forceinline__ void load_scales(const uint8_t *tile, int panel, int part, int lane,
                                            float2 scales[kPartGroups][2]) {
    const int row = panel * 16 + lane / 4, t = lane % 4;
    if constexpr (kScheme == SCHEME_Q6_K) {  // 4 groups: lane t unpacks group t
        const float own[2] = {group_scale(tile, row, part * 4 + t).x,
                              group_scale(tile, row + 8, part * 4 + t).x};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float scale = __shfl_sync(0xFFFFFFFFu, own[i % 2], i / 2, 4);
            scales[i / 2][i % 2] = {scale, -float(kZeroPoint) * scale};
        }
    } else if constexpr (kIsKQuant) {  // 2 groups of 2 rows: lane t unpacks group t / 2 of row t % 2
        const float2 own = group_scale(tile, row + t % 2 * 8, part * 2 + t / 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scales[i / 2][i % 2] = {__shfl_sync(0xFFFFFFFFu, own.x, i, 4),
                                    __shfl_sync(0xFFFFFFFFu, own.y, i, 4)};
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2 * kPartGroups; ++i)
            scales[i / 2][i % 2] = group_scale(tile, row + i % 2 * 8, part * 64 / kGroup + i / 2);
    }
}

__device__ __forceinline__ uint32_t round_to_bf16x2(float lo, float hi) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
}

// A pair of biased codes -> bf16 weights; `scale` as group_scale gives it.
__device__ __forceinline__ uint32_t dequantize_pair(uint32_t codes, float2 scale) {
    const float offset = fmaf(scale.x, -float(kCodeBias), scale.y);
    return round_to_bf16x2(fmaf(scale.x, __uint_as_float(codes << 16), offset),
                           fmaf(scale.x, __uint_as_float(codes & 0xFFFF0000u), offset));
}

// What the fragments of int4 weights are multiplied with, so sums of their products too: see
// load_scales_of_part.
constexpr float kFragmentScale = kIsInt4 ? 0x1p-37f : 1.0f;

// What a lane holds of 64 columns of a panel before it dequantizes them.
struct Part {
    CodeWords words;
    // int4: pairs of equal bf16, [group][row g, g + 8]; offsets: what to add, or with zero points to subtract
    uint32_t scales[kPartGroups][2], offsets[kPartGroups][2];
    float2 values[kIsInt4 ? 1 : kPartGroups][2];  // others: as group_scale gives them
};

// All lanes of the warp call it. Of int4 weights:
// A code in bits 0..3 of a bf16 is q * 2^-133, one in bits 4..7 is 16 q * 2^-133: in the last binade of
// normal numbers bit 7 counts as it does among the subnormal ones, so no shift and no bias is needed. Row g
// has its codes in the low bits, row g + 8 in the high ones. Scales times 2^96 and 2^92 make both q * scale *
// 2^-37, a normal number for every scale between 2^-85 and 2^31.
__device__ __forceinline__ void load_scales_of_part(const uint8_t *tile, int panel, int part, int lane,
                                                    Part &result) {
    if constexpr (kIsInt4) {
        constexpr uint32_t kTimes[2] = {0x6F806F80u, 0x6D806D80u};  // 2^96, 2^92
        constexpr uint32_t kTimesOffset = 0xAE80AE80u;              // -2^-34 = -kZeroPoint * 2^-37
        const int row = panel * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < 2 * kPartGroups; ++i) {
            const int at = (part * 64 / kGroup + i / 2) * 64 + row + i % 2 * 8;
            const uint32_t scale = reinterpret_cast<const uint16_t *>(tile)[at] * 0x10001u;
            result.scales[i / 2][i % 2] = multiply_bf16x2(scale, kTimes[i % 2]);
            uint32_t &offset = result.offsets[i / 2][i % 2];
            if constexpr (kHasZeroPoints) {
                offset = tile[kUnit / kGroup * 128 + at] * 0x10001u;
                if (i % 2 == 1) offset = multiply_bf16x2(offset, 0x41804180u);  // 16
            } else {
                static_assert(kZeroPoint == 8 || !kIsInt4 || kHasZeroPoints, "kTimesOffset");
                offset = multiply_bf16x2(scale, kTimesOffset);
            }
        }
    } else {
        load_scales(tile, panel, part, lane, result.values);
    }
}

// The fragment of step 0..3 of a part, times kFragmentScale.
__device__ __forceinline__ void dequantize_fragment(const Part &part, int step, uint32_t a[4]) {
    const int group = step * 16 / kPartGroup;
    if constexpr (kIsInt4) {
        const uint32_t low = step_word(part.words.low, step), high = low >> 8;
        const uint32_t codes[4] = {low & 0x000F000Fu, low & 0x00F000F0u, high & 0x000F000Fu,
                                   high & 0x00F000F0u};
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // code less zero point is exact, so is the offset: rounded once
            const uint32_t scale = part.scales[group][i % 2], offset = part.offsets[group][i % 2];
            a[i] = kHasZeroPoints ? multiply_bf16x2(subtract_bf16x2(codes[i], offset), scale)
                                  : fma_bf16x2(codes[i], scale, offset);
        }
    } else {
        unpack_codes(part.words, step, a);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = dequantize_pair(a[i], part.values[group][i % 2]);
    }
}

// The 4 fragments of 64 columns (part of the tile), times kFragmentScale. All lanes of the warp call it.
__device__ __forceinline__ void load_fragments(const uint8_t *tile, int panel, int part, int lane,
                                               uint32_t a[4][4]) {
    if constexpr (kScheme == SCHEME_BF16) {
        const int row = panel * 16 + lane / 4;
        const uint8_t *rows = tile + row * 128 + lane % 4 * 4;
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int chunk = (2 * step + i / 2) ^ (row & 7);  // rows g and g + 8 swizzle alike
                a[step][i] = *reinterpret_cast<const uint32_t *>(rows + i % 2 * 1024 + chunk * 16);
            }
        }
    } else {
        Part loaded;
        loaded.words = load_code_words(tile, panel, part, lane);
        load_scales_of_part(tile, panel, part, lane, loaded);
#pragma unroll
        for (int step = 0; step < 4; ++step) dequantize_fragment(loaded, step, a[step]);
    }
}

// Element (row, column) of a tile in f32.
__device__ __forceinline__ float load_element(const uint8_t *tile, int row, int column) {
    if constexpr (kScheme == SCHEME_BF16) {
        const int chunk = column / 8 ^ (row & 7);
        const uint16_t bits = reinterpret_cast<const uint16_t *>(tile)[row * 64 + chunk * 8 + column % 8];
        return __uint_as_float(uint32_t(bits) << 16);
    } else {
        const int part = column / 64, step = column % 64 / 16, panel = row / 16;
        const int lane = row % 8 * 4 + column % 8 / 2;
        const int pair = row % 16 / 8 + column % 16 / 8 * 2, is_hi = column % 2;
        const uint8_t *codes = tile + kHeaderBytes + part * kCodeBytes;
        int code;
        if constexpr (kScheme == SCHEME_Q8_0) {
            const int byte = panel * 1024 + step / 2 * 512 + lane * 16 + step % 2 * 8 + pair * 2 + is_hi;
            code = reinterpret_cast<const int8_t *>(codes)[byte];
        } else {
            const uint32_t word = reinterpret_cast<const uint32_t *>(codes)[(panel * 32 + lane) * 4 + step];
            code = word >> (4 * pair + 16 * is_hi) & 15;
        }
        const int high_index = ((part * 4 + panel) * 32 + lane) * 4 + step;
        if constexpr (kHighBits == 1) code |= (tile[kHighOffset + high_index] >> (pair + 4 * is_hi) & 1) << 4;
        if constexpr (kHighBits == 2) {
            const uint16_t word = reinterpret_cast<const uint16_t *>(tile + kHighOffset)[high_index];
            code |= (word >> (2 * pair + 8 * is_hi) & 3) << 4;
        }
        const float2 scale = group_scale(tile, row, column / kGroup);
        return fmaf(scale.x, float(code), scale.y);
    }
}

}  // namespace castiron
