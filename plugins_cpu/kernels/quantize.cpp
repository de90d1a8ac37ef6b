#include "quantize.h"

#include "rows.h"

namespace castiron {
namespace {

void quantize_q8(const QuantizeQ8Params &p, const Context &context) {
    for_each_piece(
        live_count(p.count, context), p.dim, context, [&](int64_t row, int64_t begin, int64_t end) {
            quantize_columns(p.x + row * p.x_stride + begin, p.q, p.scale, p.sum, row, p.dim, begin, end);
        });
}

void silu_mul_q8(const SiluMulQ8Params &p, const Context &context) {
    for_each_piece(live_count(p.count, context), p.dim, context,
                   [&](int64_t row, int64_t begin, int64_t end) {
                       float product[kPieceColumns];
                       map_elements(p.a + row * p.a_stride + begin, p.b + row * p.b_stride + begin, product,
                                    end - begin, [](Vec a, Vec b) { return silu(a) * b; });
                       quantize_columns(product, p.q, p.scale, p.sum, row, p.dim, begin, end);
                   });
}

CASTIRON_KERNEL("quantize_q8", QuantizeQ8Params, quantize_q8);
CASTIRON_KERNEL("silu_mul_q8", SiluMulQ8Params, silu_mul_q8);

}  // namespace
}  // namespace castiron
