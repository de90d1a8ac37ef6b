// Cosines and sines of rotary position embedding (RoFormer, arXiv:2104.09864): one thread an angle. Positions
// reach 10^6, so the sine and cosine reduce their argument exactly (no fast intrinsics).
#include "abi.cuh"

extern "C" __global__ void __launch_bounds__(128, 1)
    rope_cos_sin(const __grid_constant__ castiron::RopeCosSinParams p) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t token = index / p.half;
    const bool live = token < p.header[p.count];
    float sine = 0, cosine = 0;
    if (live)
        sincosf(static_cast<float>(p.positions[token]) * p.inv_freq[index - token * p.half], &sine, &cosine);
    castiron::let_next_start();
    castiron::wait_for_inputs();  // the inputs are in the step block, but the outputs may still be in use
    if (live) {
        p.cos[index] = cosine * p.scaling;
        p.sin[index] = sine * p.scaling;
    }
}
