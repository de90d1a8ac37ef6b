// Kernels with one mistake each, which compute-sanitizer must find: planted_mistakes.py launches them.
#include <stdint.h>

// Writes one element beyond `count`.
extern "C" __global__ void planted_memcheck(int32_t *y, int32_t count) {
    if (threadIdx.x <= count) y[threadIdx.x] = threadIdx.x;
}

// Reads another warp's shared memory without waiting for it.
extern "C" __global__ void planted_racecheck(int32_t *y, int32_t count) {
    __shared__ int32_t values[64];
    values[threadIdx.x] = threadIdx.x * count;
    y[threadIdx.x] = values[63 - threadIdx.x];
}

// Half of a block waits at a barrier for all of it.
extern "C" __global__ void planted_synccheck(int32_t *y, int32_t count) {
    if (threadIdx.x % 2 == 0) __syncthreads();
    y[threadIdx.x] = count;
}
