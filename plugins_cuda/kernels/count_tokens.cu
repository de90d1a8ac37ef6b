// One more of the token that each row with penalties got.
#include "logits_abi.cuh"

namespace castiron {

extern "C" __global__ void __launch_bounds__(128) count_tokens(const __grid_constant__ CountTokensParams p) {
    const int64_t row = blockIdx.x * 128 + threadIdx.x;
    let_next_start();
    wait_for_inputs();
    if (row >= p.header[p.count]) return;
    const int owner = p.sample_rows[row];
    if (owner < 0 || !has_penalty(p, row)) return;
    p.token_counts[static_cast<int64_t>(owner) * p.vocab + p.sampled_token_ids[row]] += 1;
}

}  // namespace castiron
