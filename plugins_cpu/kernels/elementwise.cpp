#include <cstring>

#include "rows.h"

namespace castiron {
namespace {

template <typename F>
void binary(const BinaryParams &p, const Context &context, F fn) {
    for_each_piece(live_count(p.count, context), p.dim, context,
                   [&](int64_t row, int64_t begin, int64_t end) {
                       map_elements(p.a + row * p.a_stride + begin, p.b + row * p.b_stride + begin,
                                    p.y + row * p.y_stride + begin, end - begin, fn);
                   });
}

void add(const BinaryParams &p, const Context &context) {
    binary(p, context, [](Vec a, Vec b) { return a + b; });
}

void mul(const BinaryParams &p, const Context &context) {
    binary(p, context, [](Vec a, Vec b) { return a * b; });
}

void silu_mul(const BinaryParams &p, const Context &context) {
    binary(p, context, [](Vec a, Vec b) { return silu(a) * b; });
}

void silu_rows(const SiluParams &p, const Context &context) {
    for_each_piece(live_count(p.count, context), p.dim, context,
                   [&](int64_t row, int64_t begin, int64_t end) {
                       const float *x = p.x + row * p.x_stride + begin;
                       map_elements(x, x, p.y + row * p.y_stride + begin, end - begin,
                                    [](Vec a, Vec) { return silu(a); });
                   });
}

void gather_rows(const GatherRowsParams &p, const Context &context) {
    for_each_piece(live_count(p.count, context), p.dim, context,
                   [&](int64_t row, int64_t begin, int64_t end) {
                       std::memcpy(p.y + row * p.y_stride + begin, p.x + p.rows[row] * p.x_stride + begin,
                                   static_cast<size_t>(end - begin) * sizeof(float));
                   });
}

CASTIRON_KERNEL("add", BinaryParams, add);
CASTIRON_KERNEL("mul", BinaryParams, mul);
CASTIRON_KERNEL("silu_mul", BinaryParams, silu_mul);
CASTIRON_KERNEL("silu", SiluParams, silu_rows);
CASTIRON_KERNEL("gather_rows", GatherRowsParams, gather_rows);

}  // namespace
}  // namespace castiron
