#include <cmath>

#include "quantize.h"
#include "rows.h"

namespace castiron {
namespace {

// 1 / sqrt(mean of squares + eps) of a row. Four partial sums a lane, always added in the same order.
float inverse_rms(const float *x, int64_t dim, float eps) {
    Vec sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    int64_t i = 0;
    for (; i + 4 * kVecLanes <= dim; i += 4 * kVecLanes) {
        for (int j = 0; j < 4; ++j) {
            const Vec value = load(x + i + j * kVecLanes);
            sums[j] = fma(value, value, sums[j]);
        }
    }
    for (int j = 0; i < dim; i += kVecLanes, ++j) {
        const Vec value = load_first(x + i, static_cast<int>(std::min<int64_t>(dim - i, kVecLanes)));
        sums[j] = fma(value, value, sums[j]);
    }
    const float total = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    return 1.0f / std::sqrt(total / static_cast<float>(dim) + eps);
}

// sum_out = x + residual; it may be either of them.
void add_row(const float *x, const float *residual, float *sum_out, int64_t dim) {
    map_elements(x, residual, sum_out, dim, [](Vec a, Vec b) { return a + b; });
}

void norm_row(const float *x, const float *weight, float eps, float *y, int64_t dim) {
    const Vec factor = splat(inverse_rms(x, dim, eps));
    map_elements(x, weight, y, dim, [=](Vec value, Vec w) { return value * factor * w; });
}

void norm_row_q8(const float *x, const float *weight, float eps, int64_t dim, int64_t row, int8_t *q,
                 float *scale, float *sum) {
    const Vec factor = splat(inverse_rms(x, dim, eps));
    for (int64_t i = 0; i < dim; i += kQuantGroup) {
        float y[kQuantGroup];
        map_elements(x + i, weight + i, y, kQuantGroup, [=](Vec value, Vec w) { return value * factor * w; });
        quantize_group(y, QuantizedPlace(q, scale, sum, row, dim, i));
    }
}

template <typename F>
void for_each_row(int32_t count, const Context &context, F fn) {
    const Range mine = share(live_count(count, context), context);
    for (int64_t row = mine.begin; row < mine.end; ++row) fn(row);
}

void rms_norm(const RmsNormParams &p, const Context &context) {
    for_each_row(p.count, context, [&](int64_t row) {
        norm_row(p.x + row * p.x_stride, p.weight, p.eps, p.y + row * p.y_stride, p.dim);
    });
}

void rms_norm_q8(const RmsNormQ8Params &p, const Context &context) {
    for_each_row(p.count, context, [&](int64_t row) {
        norm_row_q8(p.x + row * p.x_stride, p.weight, p.eps, p.dim, row, p.q, p.scale, p.sum);
    });
}

void add_rms_norm(const AddRmsNormParams &p, const Context &context) {
    for_each_row(p.count, context, [&](int64_t row) {
        float *sum_out = p.residual_out + row * p.residual_out_stride;
        add_row(p.x + row * p.x_stride, p.residual + row * p.residual_stride, sum_out, p.dim);
        norm_row(sum_out, p.weight, p.eps, p.y + row * p.y_stride, p.dim);
    });
}

void add_rms_norm_q8(const AddRmsNormQ8Params &p, const Context &context) {
    for_each_row(p.count, context, [&](int64_t row) {
        float *sum_out = p.residual_out + row * p.residual_out_stride;
        add_row(p.x + row * p.x_stride, p.residual + row * p.residual_stride, sum_out, p.dim);
        norm_row_q8(sum_out, p.weight, p.eps, p.dim, row, p.q, p.scale, p.sum);
    });
}

CASTIRON_KERNEL("rms_norm", RmsNormParams, rms_norm);
CASTIRON_KERNEL("rms_norm_q8", RmsNormQ8Params, rms_norm_q8);
CASTIRON_KERNEL("add_rms_norm", AddRmsNormParams, add_rms_norm);
CASTIRON_KERNEL("add_rms_norm_q8", AddRmsNormQ8Params, add_rms_norm_q8);

}  // namespace
}  // namespace castiron
