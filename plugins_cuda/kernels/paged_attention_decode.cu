// paged_attention for decode steps: at most a few query tokens a sequence.
#include "attention_decode.cuh"

#ifndef STAGES
#define STAGES 2
#define PER_SM 1
#endif
constexpr int kWarps = 4;

extern "C" __global__ void __launch_bounds__(kWarps * 32, PER_SM)
    paged_attention_decode(const __grid_constant__ castiron::PagedAttentionParams p) {
    extern __shared__ uint4 shared_memory[];
    castiron::attend_decode<kWarps, STAGES>(p, reinterpret_cast<uint8_t *>(shared_memory), blockIdx.x,
                                            gridDim.x, INT32_MAX);
}
