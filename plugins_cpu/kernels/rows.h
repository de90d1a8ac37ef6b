// How element-wise kernels walk a matrix: rows are cut into pieces, so that one row can keep all threads
// busy.
#pragma once
#include <algorithm>

#include "float_vector.h"
#include "registry.h"

namespace castiron {

constexpr int64_t kPieceColumns = 256;  // a multiple of kQuantGroup

// Calls fn(row, first column, past the last column) for this thread's pieces of a [num_rows, dim] matrix.
template <typename F>
void for_each_piece(int64_t num_rows, int64_t dim, const Context &context, F fn) {
    const int64_t pieces = (dim + kPieceColumns - 1) / kPieceColumns;
    const Range mine = share(num_rows * pieces, context);
    for (int64_t item = mine.begin; item < mine.end; ++item) {
        const int64_t begin = item % pieces * kPieceColumns;
        fn(item / pieces, begin, std::min(begin + kPieceColumns, dim));
    }
}

// y[i] = fn(a[i], b[i]) for whole vectors, then for the rest of them.
template <typename F>
void map_elements(const float *a, const float *b, float *y, int64_t count, F fn) {
    int64_t i = 0;
    for (; i + kVecLanes <= count; i += kVecLanes) store(y + i, fn(load(a + i), load(b + i)));
    const int rest = static_cast<int>(count - i);
    if (rest > 0) store_first(y + i, fn(load_first(a + i, rest), load_first(b + i, rest)), rest);
}

}  // namespace castiron
