// Made-up weights, written straight into their memory at load: the bytes of runtime/dummy_weights.py, which
// says what they are. Random words are Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1,
// 2, 3", SC 2011): a thread makes the 32 bytes of one counter value, so no thread needs another's. No kernel
// of a plan: the runtime launches it once for each tensor before it builds graphs (devices/cuda_dummy.py).
#include <cuda_fp16.h>
#include <stdint.h>

namespace castiron {

constexpr int kMaxFields = 4;
constexpr int kBlockBytes = 32;

enum Kind : int32_t { kBits = 0, kE4m3 = 1, kF32 = 2, kF16 = 3, kBf16 = 4, kF16Multiple = 5 };

struct FillDummyField {     // bytes of a unit that are alike; from the end of the field before on
    int32_t end;            // bytes from the unit's start
    int32_t kind;           // Kind
    uint32_t mask;          // of kBits, the same in each byte
    int32_t blocks_before;  // of kF16Multiple: where what it multiplies lies, in random blocks
    float mean, amplitude;  // element = mean + amplitude * u
    float factor;           // of kF16Multiple
    int32_t pad;
};
struct FillDummyParams {
    uint8_t *y;       // 32-byte aligned
    uint64_t key[2];  // of the generator, low word first
    int64_t num_bytes;
    int32_t unit_bytes;  // a multiple of 32, as all ends of fields
    int32_t num_fields;
    FillDummyField fields[kMaxFields];
};

union Block {
    uint64_t words[4];
    uint32_t quads[8];
    uint16_t pairs[16];
    uint8_t bytes[kBlockBytes];
    uint4 vectors[2];
};

__device__ __forceinline__ Block random_block(uint64_t counter, uint64_t key0, uint64_t key1) {
    constexpr uint64_t kMultiply0 = 0xD2E7470EE14C6C93ull, kMultiply1 = 0xCA5A826395121157ull;
    constexpr uint64_t kWeyl0 = 0x9E3779B97F4A7C15ull, kWeyl1 = 0xBB67AE8584CAA73Bull;
    uint64_t c0 = counter, c1 = 0, c2 = 0, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64_t high0 = __umul64hi(kMultiply0, c0), low0 = kMultiply0 * c0;
        const uint64_t high1 = __umul64hi(kMultiply1, c2), low1 = kMultiply1 * c2;
        c0 = high1 ^ c1 ^ key0;
        c1 = low1;
        c2 = high0 ^ c3 ^ key1;
        c3 = low0;
        key0 += kWeyl0;
        key1 += kWeyl1;
    }
    Block block;
    block.words[0] = c0;
    block.words[1] = c1;
    block.words[2] = c2;
    block.words[3] = c3;
    return block;
}

// mean + amplitude * u, product and sum rounded each by itself, as numpy does.
__device__ __forceinline__ float uniform(const FillDummyField &field, uint32_t bits16) {
    const float u = static_cast<float>(bits16) * (1.0f / 32768.0f) - 1.0f;  // exact
    return __fadd_rn(field.mean, __fmul_rn(field.amplitude, u));
}

__device__ __forceinline__ void make_field(const FillDummyField &field, Block &block) {
    switch (field.kind) {
        case kBits:
#pragma unroll
            for (int i = 0; i < 8; ++i) block.quads[i] &= field.mask * 0x01010101u;
            break;
        case kE4m3:  // bit 7 of each byte of the sum: its low bits are all ones, which is NaN
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint32_t sum = (block.quads[i] & 0x7F7F7F7Fu) + 0x01010101u;
                block.quads[i] ^= (sum & 0x80808080u) >> 7;
            }
            break;
        case kF32:
#pragma unroll
            for (int i = 0; i < 8; ++i)
                block.quads[i] = __float_as_uint(uniform(field, block.quads[i] & 0xFFFFu));
            break;
        case kBf16:
#pragma unroll
            for (int i = 0; i < 16; ++i)
                block.pairs[i] = static_cast<uint16_t>(__float_as_uint(uniform(field, block.pairs[i])) >> 16);
            break;
        case kF16:
        default:
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                __half value = __float2half_rn(uniform(field, block.pairs[i]));
                if (field.kind == kF16Multiple)
                    value = __float2half_rn(__fmul_rn(__half2float(value), field.factor));
                block.pairs[i] = __half_as_ushort(value);
            }
            break;
    }
}

extern "C" __global__ void __launch_bounds__(256) fill_dummy(const __grid_constant__ FillDummyParams p) {
    const int64_t num_blocks = (p.num_bytes + kBlockBytes - 1) / kBlockBytes;
    const uint64_t blocks_per_unit = p.unit_bytes / kBlockBytes;
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; index < num_blocks;
         index += step) {
        const int in_unit = static_cast<int>(static_cast<uint64_t>(index) % blocks_per_unit) * kBlockBytes;
        int number = 0;
        while (number + 1 < p.num_fields && in_unit >= p.fields[number].end) ++number;
        const FillDummyField field = p.fields[number];
        Block block = random_block(index - field.blocks_before + 1, p.key[0], p.key[1]);
        make_field(field, block);
        uint8_t *y = p.y + index * kBlockBytes;
        const int64_t left = p.num_bytes - index * kBlockBytes;
        if (left >= kBlockBytes) {
            reinterpret_cast<uint4 *>(y)[0] = block.vectors[0];
            reinterpret_cast<uint4 *>(y)[1] = block.vectors[1];
        } else {  // the last block of a tensor that ends inside it
#pragma unroll
            for (int i = 0; i < kBlockBytes; ++i)
                if (i < left) y[i] = block.bytes[i];
        }
    }
}

}  // namespace castiron
