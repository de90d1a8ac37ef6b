// A random token of each row of logits, and log probabilities where they are asked for.
#include "draw_token.cuh"
#include "logprobs.cuh"

namespace castiron {

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sample_random(const __grid_constant__ SampleRandomParams p) {
    __shared__ RowCluster::Slots slots;
    __shared__ TopTokens top;
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    const int64_t row = blockIdx.y;
    let_next_start();
    if (row >= p.header[p.count]) {
        wait_for_inputs();
        return;
    }
    const DrawMemory memory(dynamic_shared);
    const int num_logprobs = p.num_logprobs[row];
    const Draw draw(p, row);
    top.clear();
    RowCluster cluster(slots);
    const RowPart part(p.logits + row * p.logits_stride, p.vocab, cluster.rank());
    wait_for_inputs();

    Best best = largest_logit(part, [&](int quad, const float4 &logits) {
        if (kHoldsRow && quad < part.num_quads) memory.held[quad] = logits;
    });
    cluster.start();
    best = cluster.best(best);
    if (best.token == kNoToken) best.token = 0;  // all logits are NaN

    double log_total = 0.0;
    if (num_logprobs >= 0) {
        auto logits = [&](int quad) { return kHoldsRow ? memory.held[quad] : part.load(quad); };
        log_total = log_sum(cluster, part, logits, best.value);
        if (num_logprobs > 0) {
            find_top_tokens(cluster, top, part, logits, min(num_logprobs, kMaxLogprobs));
        }
    }
    const uint32_t token = draw_token(cluster, part, memory, best, draw);
    if (cluster.rank() == 0) write_row(p, row, top, best.value, log_total, token);
}

}  // namespace castiron
