// The most likely token of each row of logits: a cluster of CTAs does a row, each with its loads all in
// flight.
#include "logprobs.cuh"

namespace castiron {

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    sample_greedy(const __grid_constant__ SampleGreedyParams p) {
    __shared__ RowCluster::Slots slots;
    __shared__ TopTokens top;
    const int64_t row = blockIdx.y;
    let_next_start();
    if (row >= p.header[p.count]) {
        wait_for_inputs();
        return;
    }
    const int num_logprobs = p.num_logprobs[row];
    top.clear();
    RowCluster cluster(slots);
    const RowPart part(p.logits + row * p.logits_stride, p.vocab, cluster.rank());
    wait_for_inputs();

    Best best = largest_logit(part, [](int, const float4 &) {});
    cluster.start();
    best = cluster.best(best);
    if (best.token == kNoToken) best.token = 0;  // all logits are NaN

    double log_total = 0.0;
    if (num_logprobs >= 0) {
        auto logits = [&](int quad) { return part.load(quad); };
        log_total = log_sum(cluster, part, logits, best.value);
        if (num_logprobs > 0) {
            find_top_tokens(cluster, top, part, logits, min(num_logprobs, kMaxLogprobs));
        }
    }
    if (cluster.rank() == 0) write_row(p, row, top, best.value, log_total, best.token);
}

}  // namespace castiron
