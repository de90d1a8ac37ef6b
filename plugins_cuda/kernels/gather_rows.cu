// y[i] = x[rows[i]]: bits are copied, whatever they mean. rows is a field of the step block.
#include "abi.cuh"

namespace castiron {
namespace {

template <typename Word>
__device__ __forceinline__ bool made_of(const GatherRowsParams &p) {
    const uint64_t x = reinterpret_cast<uint64_t>(p.x), y = reinterpret_cast<uint64_t>(p.y);
    const uint64_t bytes = static_cast<uint64_t>(p.x_stride | p.y_stride | p.dim) * p.item_bytes;
    return (x | y | bytes) % sizeof(Word) == 0;
}

template <typename Word>
__device__ __forceinline__ void copy_rows(const GatherRowsParams &p, int num_rows) {
    const int words = static_cast<int>(static_cast<int64_t>(p.dim) * p.item_bytes / sizeof(Word));
    const int first = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    for (int64_t row = blockIdx.y; row < num_rows; row += gridDim.y) {
        const int64_t from = p.rows[row] * p.x_stride * p.item_bytes, to = row * p.y_stride * p.item_bytes;
        const Word *x = reinterpret_cast<const Word *>(static_cast<const char *>(p.x) + from);
        Word *y = reinterpret_cast<Word *>(static_cast<char *>(p.y) + to);
        for (int i = first; i < words; i += threads) y[i] = x[i];
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) gather_rows(const __grid_constant__ GatherRowsParams p) {
    const int num_rows = p.header[p.count];
    let_next_start();
    wait_for_inputs();
    if (made_of<uint4>(p)) {
        copy_rows<uint4>(p, num_rows);
    } else if (made_of<uint32_t>(p)) {
        copy_rows<uint32_t>(p, num_rows);
    } else {
        copy_rows<uint16_t>(p, num_rows);
    }
}

}  // namespace castiron
