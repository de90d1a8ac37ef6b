// Causal attention over a paged cache: online softmax over tiles of kTile positions.
//
// Row stability: for one query token and head the procedure is the same whoever computes it. Tiles are
// aligned to absolute positions and visited in order; in a tile each score is a sum over head_dim in order,
// the largest score and the sum of weights come from a fixed lane pattern, and values are added in order of
// position, stopping at the query's own. Rows (token, head) share loads, never sums, so batch, chunk and
// threads can't show.
//
// A unit of work is a tile of query tokens of one sequence with one head; consecutive heads of a key head
// that fall to the same thread are computed together from one copy of the keys, transposed, and values, as
// floats.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kv_write.h"
#include "registry.h"

namespace castiron {
namespace {

constexpr int kTile = 64;         // positions
constexpr int kQueryTokens = 32;  // of a unit of work
constexpr int kMaxHeads = 8;      // computed together
constexpr int kMaxRows = kQueryTokens * kMaxHeads;
constexpr int kMaxHeadDim = 256;  // the builder refuses more
// Rows and columns of a register block, by how many vector registers there are.
constexpr int kBlockRows = kVecLanes == 16 ? 6 : kVecLanes == 8 ? 3 : 1;
constexpr int kBlockColumns = 4;

struct Scratch {
    float q[kMaxRows * kMaxHeadDim];     // [rows, padded dim], times scale
    float sum[kMaxRows * kMaxHeadDim];   // [rows, padded dim], weighted sum of values so far
    float keys[kMaxHeadDim * kTile];     // [head_dim, kTile]
    float values[kTile * kMaxHeadDim];   // [kTile, padded dim]
    float largest[kMaxRows];             // score so far
    float weight[kMaxRows * kVecLanes];  // sum of weights so far, by lane
};
static_assert(sizeof(Scratch) <= kScratchBytes, "attention scratch");

// Query tokens of one sequence and heads sharing a key head.
struct Work {
    const int32_t *block_table;
    int64_t first_token;     // in the step
    int64_t first_position;  // of that token
    int num_tokens;
    int64_t kv_head, first_head;
    int num_heads;
};

#if defined(__AVX2__)
inline __m256 load_eight(const float *p) { return _mm256_loadu_ps(p); }
inline __m256 load_eight(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}

// to[d * kTile + j] = rows[j][d] for 8 rows and 8 dims
template <typename Element>
void transpose_eight(const Element *const *rows, int64_t d, float *to) {
    __m256 r[8], t[8];
    for (int j = 0; j < 8; ++j) r[j] = load_eight(rows[j] + d);
    for (int j = 0; j < 8; j += 2) {
        t[j] = _mm256_unpacklo_ps(r[j], r[j + 1]);
        t[j + 1] = _mm256_unpackhi_ps(r[j], r[j + 1]);
    }
    for (int j = 0; j < 8; j += 4) {
        r[j] = _mm256_shuffle_ps(t[j], t[j + 2], 0x44);
        r[j + 1] = _mm256_shuffle_ps(t[j], t[j + 2], 0xEE);
        r[j + 2] = _mm256_shuffle_ps(t[j + 1], t[j + 3], 0x44);
        r[j + 3] = _mm256_shuffle_ps(t[j + 1], t[j + 3], 0xEE);
    }
    for (int j = 0; j < 4; ++j) {
        _mm256_storeu_ps(to + j * kTile, _mm256_permute2f128_ps(r[j], r[j + 4], 0x20));
        _mm256_storeu_ps(to + (j + 4) * kTile, _mm256_permute2f128_ps(r[j], r[j + 4], 0x31));
    }
}
constexpr int64_t kTransposeDims = 8;
#else
template <typename Element>
void transpose_eight(const Element *const *, int64_t, float *) {}
constexpr int64_t kTransposeDims = 0;
#endif

// Scores of kRows rows with the tile's positions: each the sum over head_dim in order.
template <int kRows>
void score_rows(const float *q, int64_t q_stride, const float *keys, int64_t head_dim, float *scores) {
    constexpr int kVecs = kTile / kVecLanes;
    Vec sums[kRows][kVecs];
    CASTIRON_UNROLL
    for (int r = 0; r < kRows; ++r) {
        CASTIRON_UNROLL
        for (int c = 0; c < kVecs; ++c) sums[r][c] = splat(0.0f);
    }
    for (int64_t d = 0; d < head_dim; ++d) {
        Vec query[kRows];
        CASTIRON_UNROLL
        for (int r = 0; r < kRows; ++r) query[r] = splat(q[r * q_stride + d]);
        CASTIRON_UNROLL
        for (int c = 0; c < kVecs; ++c) {
            const Vec key = load(keys + d * kTile + c * kVecLanes);
            CASTIRON_UNROLL
            for (int r = 0; r < kRows; ++r) sums[r][c] = fma(query[r], key, sums[r][c]);
        }
    }
    CASTIRON_UNROLL
    for (int r = 0; r < kRows; ++r) {
        CASTIRON_UNROLL
        for (int c = 0; c < kVecs; ++c) store(scores + r * kTile + c * kVecLanes, sums[r][c]);
    }
}

// Turns a row's scores into weights e^(score - largest so far). Returns the factor for earlier sums.
float softmax_tile(float *scores, int visible, float *largest, float *weight) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const int seen = (visible + kVecLanes - 1) / kVecLanes * kVecLanes;
    if (visible < seen) {
        float *last = scores + seen - kVecLanes;
        store(last, select(first_lanes(visible - seen + kVecLanes), load(last), splat(-kInfinity)));
    }
    Vec most = splat(-kInfinity);
    for (int i = 0; i < seen; i += kVecLanes) most = max(load(scores + i), most);
    const float before = *largest;
    const float now = std::max(before, max_lanes(most));
    *largest = now;
    Vec total = splat(0.0f);
    for (int i = 0; i < seen; i += kVecLanes) {
        const Vec x = exp(load(scores + i) - splat(now));  // exactly 0 beyond the visible ones
        store(scores + i, x);
        total += x;
    }
    float factor = 1.0f;
    if (now != before) {
        float lanes[kVecLanes];
        store(lanes, exp(splat(before - now)));
        factor = lanes[0];
    }
    store(weight, fma(load(weight), splat(factor), total));
    return factor;
}

// sum[row] = sum[row] * factor[row] + weights[row][0 .. visible) . values: kRows rows, kColumns vectors.
template <int kRows, int kColumns>
void add_values(const float *weights, const float *factors, const float *const *value_rows, int64_t column,
                int visible, float *sum, int64_t sum_stride) {
    Vec sums[kRows][kColumns];
    CASTIRON_UNROLL
    for (int r = 0; r < kRows; ++r) {
        const Vec factor = splat(factors[r]);
        CASTIRON_UNROLL
        for (int c = 0; c < kColumns; ++c) {
            sums[r][c] = load(sum + r * sum_stride + column + c * kVecLanes) * factor;
        }
    }
    for (int j = 0; j < visible; ++j) {
        const float *values = value_rows[j] + column;
        Vec w[kRows];
        CASTIRON_UNROLL
        for (int r = 0; r < kRows; ++r) w[r] = splat(weights[r * kTile + j]);
        CASTIRON_UNROLL
        for (int c = 0; c < kColumns; ++c) {
            const Vec value = load(values + c * kVecLanes);
            CASTIRON_UNROLL
            for (int r = 0; r < kRows; ++r) sums[r][c] = fma(w[r], value, sums[r][c]);
        }
    }
    CASTIRON_UNROLL
    for (int r = 0; r < kRows; ++r) {
        CASTIRON_UNROLL
        for (int c = 0; c < kColumns; ++c) {
            store(sum + r * sum_stride + column + c * kVecLanes, sums[r][c]);
        }
    }
}

template <int kRows>
void add_values_rows(const float *weights, const float *factors, const float *const *value_rows, int visible,
                     float *sum, int64_t padded_dim) {
    int64_t column = 0;
    for (; column + kBlockColumns * kVecLanes <= padded_dim; column += kBlockColumns * kVecLanes) {
        add_values<kRows, kBlockColumns>(weights, factors, value_rows, column, visible, sum, padded_dim);
    }
    for (; column < padded_dim; column += kVecLanes) {
        add_values<kRows, 1>(weights, factors, value_rows, column, visible, sum, padded_dim);
    }
}

template <typename Element>
class Attention {
  public:
    Attention(const PagedAttentionParams &params, Scratch &scratch)
        : p_(params),
          s_(scratch),
          shape_{params.kv_heads, params.block_size, params.head_dim},
          padded_dim_((params.head_dim + kVecLanes - 1) / kVecLanes * kVecLanes) {}

    void run(const Work &work) {
        begin(work);
        const int64_t num_positions = work.first_position + work.num_tokens;
        for (int64_t tile = 0; tile * kTile < num_positions; ++tile) {
            const int loaded = static_cast<int>(std::min<int64_t>(kTile, num_positions - tile * kTile));
            load_tile(work, tile * kTile, loaded);
            const int num_rows = work.num_tokens * work.num_heads;
            int row = 0;
            for (; row + kBlockRows <= num_rows; row += kBlockRows) {
                advance_rows<kBlockRows>(work, tile * kTile, row);
            }
            for (; row < num_rows; ++row) advance_rows<1>(work, tile * kTile, row);
        }
        finish(work);
    }

  private:
    // Row token * num_heads + head of the scratch; scaled queries, empty sums.
    void begin(const Work &work) {
        for (int row = 0; row < work.num_tokens * work.num_heads; ++row) {
            const float *from = p_.q + (work.first_token + row / work.num_heads) * p_.q_stride +
                                (work.first_head + row % work.num_heads) * p_.head_dim;
            for (int64_t d = 0; d < p_.head_dim; ++d) s_.q[row * padded_dim_ + d] = from[d] * p_.scale;
            std::fill_n(s_.sum + row * padded_dim_, padded_dim_, 0.0f);
            std::fill_n(s_.weight + row * kVecLanes, kVecLanes, 0.0f);
            s_.largest[row] = -std::numeric_limits<float>::infinity();
        }
    }

    // Keys of positions first .. first + loaded to s_.keys, transposed; value_rows_ to their values.
    void load_tile(const Work &work, int64_t first, int loaded) {
        const Element *cache = static_cast<const Element *>(p_.cache);
        const Element *key_rows[kTile], *values[kTile];
        int64_t block = first / p_.block_size, offset = first % p_.block_size;
        for (int j = 0; j < loaded; ++j) {
            const int64_t at = shape_.index(work.block_table[block], kKey, work.kv_head, offset);
            key_rows[j] = cache + at;
            values[j] = cache + at + shape_.kv_heads * shape_.block_size * shape_.head_dim;
            if (++offset == p_.block_size) offset = 0, ++block;
        }
        for (int j = loaded; j < kTile; ++j) key_rows[j] = key_rows[loaded - 1];  // never seen: masked

        int64_t d = 0;
        for (; kTransposeDims > 0 && d + kTransposeDims <= p_.head_dim; d += kTransposeDims) {
            for (int j = 0; j < loaded; j += 8) transpose_eight(key_rows + j, d, s_.keys + d * kTile + j);
        }
        for (int j = 0; j < loaded; ++j) {
            for (int64_t rest = d; rest < p_.head_dim; ++rest) {
                s_.keys[rest * kTile + j] = load_element(key_rows[j] + rest);
            }
        }
        for (int j = 0; j < loaded; ++j)
            value_rows_[j] = float_values(values[j], s_.values + j * padded_dim_);
    }

    // The row itself if its floats fill whole vectors, else a padded copy.
    const float *float_values(const float *from, float *to) const {
        if (padded_dim_ == p_.head_dim) return from;
        return copy_values(from, to);
    }
    const float *float_values(const uint16_t *from, float *to) const { return copy_values(from, to); }
    template <typename From>
    const float *copy_values(const From *from, float *to) const {
        int64_t d = 0;
        for (; d + kVecLanes <= p_.head_dim; d += kVecLanes) store(to + d, load_elements(from + d));
        for (; d < p_.head_dim; ++d) to[d] = load_element(from + d);
        for (; d < padded_dim_; ++d) to[d] = 0.0f;
        return to;
    }

    // Takes the tile at position `first` into kRows rows from `row` on.
    template <int kRows>
    void advance_rows(const Work &work, int64_t first, int row) {
        auto visible_of = [&](int r) {
            const int64_t position = work.first_position + (row + r) / work.num_heads;
            return static_cast<int>(std::clamp<int64_t>(position + 1 - first, 0, kTile));
        };
        const int least = visible_of(0), most = visible_of(kRows - 1);
        if (most == 0) return;
        float scores[kRows * kTile], factors[kRows];
        score_rows<kRows>(s_.q + row * padded_dim_, padded_dim_, s_.keys, p_.head_dim, scores);
        for (int r = 0; r < kRows; ++r) {
            if (visible_of(r) == 0) continue;
            factors[r] = softmax_tile(scores + r * kTile, visible_of(r), s_.largest + row + r,
                                      s_.weight + (row + r) * kVecLanes);
        }
        float *sum = s_.sum + row * padded_dim_;
        if (least == most) {
            add_values_rows<kRows>(scores, factors, value_rows_, most, sum, padded_dim_);
            return;
        }
        for (int r = 0; r < kRows; ++r) {
            if (visible_of(r) == 0) continue;
            add_values_rows<1>(scores + r * kTile, factors + r, value_rows_, visible_of(r),
                               sum + r * padded_dim_, padded_dim_);
        }
    }

    void finish(const Work &work) {
        for (int row = 0; row < work.num_tokens * work.num_heads; ++row) {
            float *to = p_.y + (work.first_token + row / work.num_heads) * p_.y_stride +
                        (work.first_head + row % work.num_heads) * p_.head_dim;
            const float factor = 1.0f / sum_lanes(load(s_.weight + row * kVecLanes));
            for (int64_t d = 0; d < p_.head_dim; ++d) to[d] = s_.sum[row * padded_dim_ + d] * factor;
        }
    }

    const PagedAttentionParams &p_;
    Scratch &s_;
    const CacheShape shape_;
    const int64_t padded_dim_;
    const float *value_rows_[kTile];
};

// Calls fn(sequence, first token of the tile in the step, its position, tokens, cost of one head) in order.
template <typename F>
void for_each_query_tile(const PagedAttentionParams &p, int64_t num_seqs, F fn) {
    for (int64_t seq = 0; seq < num_seqs; ++seq) {
        const int64_t begin = p.query_starts[seq], end = p.query_starts[seq + 1];
        for (int64_t token = begin; token < end; token += kQueryTokens) {
            const int64_t position = p.seq_lens[seq] - (end - token);
            const int64_t num_tokens = std::min<int64_t>(kQueryTokens, end - token);
            const int64_t tiles = (position + num_tokens + kTile - 1) / kTile;
            fn(seq, token, position, num_tokens,
               tiles * (num_tokens + 1));  // loading a tile costs like a token
        }
    }
}

template <typename Element>
void paged_attention(const PagedAttentionParams &p, const Context &context) {
    const int64_t num_seqs = live_count(kNumSeqs, context);
    int64_t total = 0;
    for_each_query_tile(
        p, num_seqs, [&](int64_t, int64_t, int64_t, int64_t, int64_t cost) { total += cost * p.num_heads; });
    // a unit is this thread's if the cost of all units before it lies in the thread's part of the total
    const Range mine = share(total, context);
    const int64_t group = p.num_heads / p.kv_heads;
    Attention<Element> attention(p, *reinterpret_cast<Scratch *>(context.scratch));
    int64_t before = 0;
    for_each_query_tile(
        p, num_seqs, [&](int64_t seq, int64_t token, int64_t position, int64_t num_tokens, int64_t cost) {
            auto first_unit_at =
                [&](int64_t value) {  // first head whose units before it cost at least `value`
                    return std::clamp<int64_t>((value - before + cost - 1) / cost, 0, p.num_heads);
                };
            const int64_t last = before >= mine.end ? 0 : first_unit_at(mine.end);
            int64_t head = before >= mine.begin ? 0 : first_unit_at(mine.begin);
            while (head < last) {
                const int64_t kv_head = head / group;
                const int64_t stop = std::min({last, (kv_head + 1) * group, head + kMaxHeads});
                attention.run({p.block_tables + seq * p.table_width, token, position,
                               static_cast<int>(num_tokens), kv_head, head, static_cast<int>(stop - head)});
                head = stop;
            }
            before += cost * p.num_heads;
        });
}

CASTIRON_KERNEL("paged_attention.f32", PagedAttentionParams, paged_attention<float>);
CASTIRON_KERNEL("paged_attention.f16", PagedAttentionParams, paged_attention<uint16_t>);

}  // namespace
}  // namespace castiron
