// paged_attention for decode steps: at most a few query tokens a sequence.
// Defines: HEAD_DIM, WARPS, STAGES (of a warp's ring), PER_SM (CTAs that run on a multiprocessor).
#include "attention_decode.cuh"

constexpr int kWarps = WARPS;

extern "C" __global__ void __launch_bounds__(kWarps * 32, PER_SM)
    paged_attention_decode(const __grid_constant__ castiron::PagedAttentionParams p) {
    // whole 128-byte lines: 16 bytes off cost a tenth of the time
    extern __shared__ __align__(128) uint8_t shared_memory[];
    castiron::attend_decode<kWarps, STAGES>(p, shared_memory, blockIdx.x, gridDim.x, INT32_MAX);
}
