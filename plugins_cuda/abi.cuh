// The interface between a plan and the CUDA kernels: one parameter struct per kernel kind, passed by value.
// Mirrored by plugins_cuda/specs.py (a test compares sizes and field offsets). All matrices are row major;
// *_stride is in elements between rows. Activations are bf16, the residual stream, norms' weights and logits
// f32. `header` is the step header (runtime/step_abi.py); `count` says which of its words is the live number
// of rows: a kernel is launched for the bucket's capacity and clips to it.
#pragma once
#include <cuda_bf16.h>
#include <stdint.h>

namespace castiron {

using bf16 = __nv_bfloat16;

enum Count : int32_t { kNumTokens = 0, kNumSeqs = 1, kNumLogits = 2 };

struct alignas(64) TensorMap {  // CUtensorMap, encoded at load
    uint64_t words[16];
};

struct EmbeddingParams {
    const int32_t *token_ids;   // [tokens]; v < 0: last_token[-1 - v]
    const int32_t *last_token;  // [max_rows]
    const void *table;          // packed weight [vocab, dim]
    float *y;                   // [tokens, dim]
    const int32_t *header;
    int64_t y_stride;
    int32_t count, vocab, dim, max_rows;
};
struct RmsNormParams {
    const float *x, *weight;  // [rows, dim], [dim]
    bf16 *y;
    const int32_t *header;
    int64_t x_stride, y_stride;
    int32_t count, dim;
    float eps;
    int32_t pad;
};
struct AddRmsNormParams {  // residual_out = x + residual; y = norm(residual_out) * weight
    const bf16 *x;
    const float *residual, *weight;
    bf16 *y;
    float *residual_out;  // may be `residual`
    const int32_t *header;
    int64_t x_stride, residual_stride, y_stride, residual_out_stride;
    int32_t count, dim;
    float eps;
    int32_t pad;
};
struct AddParams {  // y = a + b: residual additions that no norm follows
    const float *a;
    const bf16 *b;
    float *y;
    const int32_t *header;
    int64_t a_stride, b_stride, y_stride;
    int32_t count, dim;
};
struct LinearParams {      // y = x . weight^T (+ bias); linear_fp8: y = x . weight^T * x_scale (+ bias)
    const void *x;         // [rows, k], bf16 or e4m3
    const void *weight;    // packed [n, k]
    const float *bias;     // [n] or null
    const float *x_scale;  // [rows]; linear_fp8 alone
    void *y;               // [rows, n], bf16 or f32 (the kernel's name says)
    const int32_t *header;
    int64_t x_stride, y_stride;
    int32_t count, n, k, pad;
};
struct LinearTmaParams {  // the same, x through a tensor map: dims {k, capacity}, box {128 bytes, rows of a
                          // tile}, 128B swizzle
    TensorMap x;
    const void *weight;
    const float *bias, *x_scale;
    void *y;
    const int32_t *header;
    int64_t y_stride;
    int32_t count, n, k, pad;
};
struct RopeCosSinParams {  // cos, sin f32 [tokens, half] = scaling * cos(position * inv_freq)
    const int32_t *positions;
    const float *inv_freq;  // [half]
    float *cos, *sin;
    const int32_t *header;
    int32_t count, half;
    float scaling;
    int32_t pad;
};
struct RopeKvWriteParams {   // rotate q and k (split-half on the first 2 * half dims), write k and v to the
                             // cache
    const bf16 *q, *k, *v;   // [tokens, heads, head_dim], [tokens, kv_heads, head_dim] twice
    const float *cos, *sin;  // [tokens, half]
    bf16 *q_out;             // [tokens, heads, head_dim]
    bf16 *cache;             // [num_blocks, 2, kv_heads, block_size, head_dim]
    const int64_t *slot_mapping;  // [tokens]; block * block_size + offset, -1 = skip
    const int32_t *header;
    int64_t q_stride, k_stride, v_stride, q_out_stride;  // between tokens; heads are dense
    int32_t count, num_heads, kv_heads, head_dim, half, block_size;
};
struct PagedAttentionParams {     // causal
    const bf16 *q;                // [tokens, heads, head_dim]
    const bf16 *cache;            // [num_blocks, 2, kv_heads, block_size, head_dim]
    const int32_t *block_tables;  // [seqs, table_width], -1 = unused
    const int32_t *seq_lens;      // [seqs], this step's tokens included
    const int32_t *query_starts;  // [seqs + 1]
    bf16 *y;                      // [tokens, heads, head_dim]
    float *partials;              // scratch of this launch, written before it is read
    int32_t *counters;            // zero before and after every launch
    const int32_t *header;
    int64_t q_stride, y_stride;
    int32_t num_heads, kv_heads, head_dim, block_size, table_width;
    float scale;
};
struct SiluMulParams {  // y = silu(a) * b
    const bf16 *a, *b;
    bf16 *y;
    const int32_t *header;
    int64_t a_stride, b_stride, y_stride;
    int32_t count, dim;
};
// Float8 outputs: y are e4m3 codes, value = scale[row] * y; input_scale is every row's scale, or 0: each row
// has its largest magnitude / 448.
struct QuantizeFp8Params {
    const bf16 *x;  // [rows, dim]
    uint8_t *y;     // [rows, dim]
    float *scale;   // [rows]
    const int32_t *header;
    int64_t x_stride, y_stride;
    int32_t count, dim;
    float input_scale;
    int32_t pad;
};
struct RmsNormFp8Params {
    const float *x, *weight;
    uint8_t *y;
    float *scale;
    const int32_t *header;
    int64_t x_stride, y_stride;
    int32_t count, dim;
    float eps, input_scale;
};
struct AddRmsNormFp8Params {
    const bf16 *x;
    const float *residual, *weight;
    uint8_t *y;
    float *scale;
    float *residual_out;  // may be `residual`
    const int32_t *header;
    int64_t x_stride, residual_stride, y_stride, residual_out_stride;
    int32_t count, dim;
    float eps, input_scale;
};
struct SiluMulFp8Params {
    const bf16 *a, *b;
    uint8_t *y;
    float *scale;
    const int32_t *header;
    int64_t a_stride, b_stride, y_stride;
    int32_t count, dim;
    float input_scale;
    int32_t pad;
};
struct GatherRowsParams {  // y[i] = x[rows[i]], for rows of `item_bytes` * dim bytes
    const void *x;
    const int32_t *rows;
    void *y;
    const int32_t *header;
    int64_t x_stride, y_stride;
    int32_t count, dim, item_bytes, pad;
};
struct SampleGreedyParams {
    const float *logits;          // [logits, vocab]
    const int32_t *sample_rows;   // row whose last_token is set; -1 = none
    const int32_t *num_logprobs;  // -1 = none
    int32_t *last_token, *sampled_token_ids;
    float *sampled_logprobs;
    int32_t *top_token_ids;  // [logits, 20]
    float *top_logprobs;
    const int32_t *header;
    int64_t logits_stride;
    int32_t count, vocab;
};
struct SampleRandomParams {
    const float *logits;
    const int32_t *sample_rows, *num_logprobs;
    const float *temperature;
    const int32_t *top_k;
    const float *top_p, *min_p;
    const uint64_t *seed;
    const int32_t *output_position;
    int32_t *last_token, *sampled_token_ids;
    float *sampled_logprobs;
    int32_t *top_token_ids;
    float *top_logprobs;
    const int32_t *header;
    int64_t logits_stride;
    int32_t count, vocab;
};

// Programmatic dependent launch. Every kernel calls wait_for_inputs() on every path of every CTA before it
// reads or writes anything but weights, load-time tables and the step block (which no kernel writes), and
// before any return. One exception: attention may read cache rows of tokens of earlier steps, which the
// kernels of this step don't write: they write only the rows of slot_mapping, and no two sequences share a
// block that is being filled. The first kernel of a step starts after the whole step before. let_next_start()
// lets the next kernel of the plan begin its own prologue. GPUs before sm_90 don't have it: there a kernel
// starts when the one before it has ended, and neither has an effect.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace castiron
