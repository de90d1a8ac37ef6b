// Sampling noise: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
// turned into Gumbel noise, as models/philox.py documents it: every device draws the same words.
#pragma once
#include <stdint.h>

namespace castiron {

// Noise of the four tokens from 4 * quad on: -log(-log(u)), u = ((word >> 9) + 0.5) / 2^23, exact in float.
__device__ __forceinline__ float4 gumbel_noise(uint64_t seed, uint32_t output_position, uint32_t quad) {
    constexpr uint32_t kMultiply0 = 0xD2511F53u, kMultiply1 = 0xCD9E8D57u;
    constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    uint32_t c[4] = {quad, output_position, 0, 0};
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = static_cast<uint64_t>(c[0]) * kMultiply0;
        const uint64_t product1 = static_cast<uint64_t>(c[2]) * kMultiply1;
        c[0] = static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ key0;
        c[2] = static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ key1;
        c[1] = static_cast<uint32_t>(product1);
        c[3] = static_cast<uint32_t>(product0);
        key0 += kWeyl0;
        key1 += kWeyl1;
    }
    float noise[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float uniform = (static_cast<float>(c[i] >> 9) + 0.5f) * (1.0f / 8388608.0f);
        // near 1, where the largest noise comes from, only the full logf is accurate; outside, 2^-21 will do
        noise[i] = -__logf(-logf(uniform));
    }
    return make_float4(noise[0], noise[1], noise[2], noise[3]);
}

}  // namespace castiron
