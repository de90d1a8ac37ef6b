// A random token of each row of `adjusted`; its log probability, its rank and the most likely tokens are
// those of `logits`.
#include "draw_token.cuh"
#include "logits_abi.cuh"
#include "logprobs.cuh"

namespace castiron {

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sample_full(const __grid_constant__ SampleFullParams p) {
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
    const RowPart adjusted(p.adjusted + row * p.adjusted_stride, p.vocab, cluster.rank());
    const RowPart part(p.logits + row * p.logits_stride, p.vocab, cluster.rank());
    wait_for_inputs();

    Best best = largest_logit(adjusted, [&](int quad, const float4 &logits) {
        if (kHoldsRow && quad < adjusted.num_quads) memory.held[quad] = logits;
    });
    cluster.start();
    best = cluster.best(best);
    if (best.token == kNoToken) best.token = 0;  // all logits are NaN
    const uint32_t token = draw_token(cluster, adjusted, memory, best, draw);

    double log_total = 0.0, more_likely = 0.0;
    Best largest = {minus_infinity(), kNoToken};
    if (num_logprobs >= 0) {
        auto logits = [&](int quad) { return part.load(quad); };
        largest = cluster.best(largest_logit(part, [](int, const float4 &) {}));
        log_total = log_sum(cluster, part, logits, largest.value);
        const float found = part.logits[token], own = found == found ? found : minus_infinity();
        for (int quad = threadIdx.x; quad < part.num_quads; quad += kThreads) {
            const float4 x = part.load(quad);
            more_likely += (x.x > own) + (x.y > own) + (x.z > own) + (x.w > own);
        }
        more_likely = cluster.sum(more_likely);
        if (num_logprobs > 0) {
            find_top_tokens(cluster, top, part, logits, min(num_logprobs, kMaxLogprobs));
        }
    }
    if (cluster.rank() != 0) return;
    if (threadIdx.x == 0) p.sampled_ranks[row] = num_logprobs < 0 ? 0 : 1 + static_cast<int32_t>(more_likely);
    write_row(p, row, top, largest.value, log_total, token);
}

}  // namespace castiron
