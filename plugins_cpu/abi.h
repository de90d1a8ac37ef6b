// The interface between a plan and the CPU kernels: one parameter struct per kernel kind and the
// context every kernel is called with. Mirrored by plugins_cpu/specs.py (a test compares sizes and
// field offsets). All matrices are row major; *_stride is in elements between rows.
#pragma once
#include <cstddef>
#include <cstdint>

namespace castiron {

constexpr char kWeightLayout[] = "n16";  // LAYOUT of layouts.py: another name for any change of packed bytes

// Words of the step header a kernel may use as its live row count (runtime/step_abi.py).
enum Count : int32_t { kNumTokens = 0, kNumSeqs = 1, kNumLogits = 2 };

struct Context {
    int32_t thread;         // 0 .. num_threads - 1
    int32_t num_threads;    // all of them call the kernel; each does its share
    const int32_t *header;  // step header: live counts
    char *scratch;          // this thread's own, kScratchBytes, 64-byte aligned, never zeroed
};
constexpr size_t kScratchBytes = 1 << 20;

using KernelFn = void (*)(const void *params, const Context &context);

struct EmbeddingParams {
    const int32_t *token_ids;   // [tokens]; v < 0: last_token[-1 - v]
    const int32_t *last_token;  // [max_rows]
    const void *table;          // packed weight [vocab, dim]
    float *y;                   // [tokens, dim]
    int64_t y_stride;
    int32_t count, vocab, dim, max_rows;
};
struct RmsNormParams {
    const float *x, *weight;  // [rows, dim], [dim]
    float *y;
    int64_t x_stride, y_stride;
    int32_t count, dim;
    float eps;
    int32_t pad;
};
// Quantized activations are two int8 digits a value, (256 * q[0] + q[1]) * scale: q int8 [rows, 2, dim],
// scale f32 [rows, dim / 32], sum f32 [rows, dim / 16] = scale * the sum of 16 such integers.
struct RmsNormQ8Params {
    const float *x, *weight;
    int8_t *q;
    float *scale, *sum;
    int64_t x_stride;
    int32_t count, dim;
    float eps;
    int32_t pad;
};
struct AddRmsNormParams {  // residual_out = x + residual; y = norm(residual_out) * weight
    const float *x, *residual, *weight;
    float *y, *residual_out;
    int64_t x_stride, residual_stride, y_stride, residual_out_stride;
    int32_t count, dim;
    float eps;
    int32_t pad;
};
struct AddRmsNormQ8Params {
    const float *x, *residual, *weight;
    int8_t *q;
    float *scale, *sum, *residual_out;
    int64_t x_stride, residual_stride, residual_out_stride;
    int32_t count, dim;
    float eps;
    int32_t pad;
};
struct QuantizeQ8Params {
    const float *x;
    int8_t *q;
    float *scale, *sum;
    int64_t x_stride;
    int32_t count, dim;
};
struct LinearParams {  // y = x . weight^T (+ bias)
    const float *x;    // [rows, k]
    const void *weight;
    const float *bias;  // [n] or null
    float *y;           // [rows, n]
    int64_t x_stride, y_stride;
    int32_t count, n, k, pad;
};
struct LinearQ8Params {
    const int8_t *q;  // [rows, 2, k], dense
    const float *scale, *sum;
    const void *weight;
    const float *bias;
    float *y;
    int64_t y_stride;
    int32_t count, n, k, pad;
};
struct RopeCosSinParams {  // cos, sin f32 [tokens, half] = scaling * cos(position * inv_freq)
    const int32_t *positions;
    const float *inv_freq;  // [half]
    float *cos, *sin;
    int32_t count, half;
    float scaling;
    int32_t pad;
};
struct ApplyRopeParams {  // split-half rotation of the first 2 * half dims of each head
    const float *x, *cos, *sin;
    float *y;
    int64_t x_stride, y_stride;  // between tokens; heads are dense
    int32_t count, num_heads, head_dim, half;
};
struct KvWriteParams {
    const float *k, *v;
    void *cache;                  // [num_blocks, 2, kv_heads, block_size, head_dim]
    const int64_t *slot_mapping;  // [tokens], -1 = skip
    int64_t k_stride, v_stride;
    int32_t count, kv_heads, block_size, head_dim;
};
struct RopeKvWriteParams {  // rotate q and k, write k and v to the cache
    const float *q, *k, *v, *cos, *sin;
    float *q_out;
    void *cache;
    const int64_t *slot_mapping;
    int64_t q_stride, k_stride, v_stride, q_out_stride;
    int32_t count, num_heads, kv_heads, head_dim, half, block_size;
};
struct PagedAttentionParams {
    const float *q;  // [tokens, heads, head_dim]
    const void *cache;
    const int32_t *block_tables, *seq_lens, *query_starts;
    float *y;  // [tokens, heads, head_dim]
    int64_t q_stride, y_stride;
    int32_t num_heads, kv_heads, head_dim, block_size, table_width;
    float scale;
};
struct BinaryParams {  // add, mul, silu_mul (silu(a) * b)
    const float *a, *b;
    float *y;
    int64_t a_stride, b_stride, y_stride;
    int32_t count, dim;
};
struct SiluParams {
    const float *x;
    float *y;
    int64_t x_stride, y_stride;
    int32_t count, dim;
};
struct SiluMulQ8Params {
    const float *a, *b;
    int8_t *q;
    float *scale, *sum;
    int64_t a_stride, b_stride;
    int32_t count, dim;
};
struct GatherRowsParams {
    const float *x;
    const int32_t *rows;
    float *y;
    int64_t x_stride, y_stride;
    int32_t count, dim;
};
struct SampleGreedyParams {
    const float *logits;          // [logits, vocab]
    const int32_t *sample_rows;   // row whose last_token is set; -1 = none
    const int32_t *num_logprobs;  // -1 = none
    int32_t *last_token, *sampled_token_ids;
    float *sampled_logprobs;
    int32_t *top_token_ids;  // [logits, 20]
    float *top_logprobs;
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
    int64_t logits_stride;
    int32_t count, vocab;
};
struct MaskLogitsParams {
    const float *logits;
    const int32_t *mask_rows;       // row of grammar_masks; -1 = none
    const uint32_t *grammar_masks;  // [logits, (vocab + 31) / 32], bit set = allowed
    float *y;
    int64_t logits_stride, y_stride;
    int32_t count, vocab;
};
struct AdjustLogitsParams {
    const float *logits;
    const int32_t *sample_rows;    // row of token_counts; -1 = none
    const uint32_t *token_counts;  // [rows, vocab]: bit 31 = in the prompt, the others = times in the output
    const float *repetition_penalty, *presence_penalty, *frequency_penalty;
    const int32_t *bias_starts;  // [logits + 1]
    const int32_t *bias_token_ids;
    const float *bias_values;
    const int32_t *allowed_rows;  // row of allowed_masks; -1 = all are allowed
    const uint32_t *allowed_masks;
    float *y;
    int64_t logits_stride, y_stride;
    int32_t count, vocab;
};
struct SampleFullParams {
    const float *logits;    // of the log probabilities
    const float *adjusted;  // that the token is drawn from
    const int32_t *sample_rows, *num_logprobs;
    const float *temperature;
    const int32_t *top_k;
    const float *top_p, *min_p;
    const uint64_t *seed;
    const int32_t *output_position;
    int32_t *last_token, *sampled_token_ids;
    float *sampled_logprobs;
    int32_t *sampled_ranks, *top_token_ids;
    float *top_logprobs;
    int64_t logits_stride, adjusted_stride;
    int32_t count, vocab;
};
struct CountTokensParams {
    uint32_t *token_counts;
    const int32_t *sampled_token_ids, *sample_rows;
    const float *repetition_penalty, *presence_penalty, *frequency_penalty;
    int32_t count, vocab;
};

}  // namespace castiron

// Exported by each level's library (library.cpp); called by runtime/devices/cpu.py through ctypes.
extern "C" {
struct CiKernelInfo {
    const char *name;
    castiron::KernelFn fn;
    uint32_t params_bytes;
};
struct CiRecord {  // runtime view of a record: relocations already applied
    castiron::KernelFn fn;
    const void *params;
    uint32_t flags;  // RecordFlag
    uint32_t pad;
};
struct CiPool;
const char *ci_source_hash(void);  // sha256 hex of the sources and flags, as the builder computed it
const char *ci_level(void);
uint32_t ci_num_kernels(void);
const CiKernelInfo *ci_kernels(void);
// Threads are pinned to the cores in `cores` (num_threads of them), started once, spin <= 50 us and then
// sleep. Asks for AMX permission first on the amx level. Null: threads or permission were refused (see
// ci_last_error).
CiPool *ci_pool_create(int32_t num_threads, const int32_t *cores);
void ci_pool_destroy(CiPool *pool);
const char *ci_last_error(void);
// Runs the records in order on all threads of the pool, the caller being thread 0. Returns 0.
int32_t ci_run(CiPool *pool, const CiRecord *records, uint32_t num_records, const int32_t *header);
}
