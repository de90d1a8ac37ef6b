// How a kernel gets into the library: CASTIRON_KERNEL beside its definition. Also how a kernel takes its
// share of the work.
#pragma once
#include "../abi.h"

namespace castiron {

// Adds a kernel to the table ci_kernels() returns. Only static objects of this type are made, through the
// macro.
struct Registration {
    Registration(const char *name, KernelFn fn, uint32_t params_bytes);
};

// The untyped entry point of a kernel `void fn(const Params &, const Context &)`.
template <typename Params, void (*fn)(const Params &, const Context &)>
void kernel_entry(const void *params, const Context &context) {
    fn(*static_cast<const Params *>(params), context);
}

#define CASTIRON_JOIN_(a, b) a##b
#define CASTIRON_JOIN(a, b) CASTIRON_JOIN_(a, b)
// CASTIRON_KERNEL("rms_norm", RmsNormParams, rms_norm); the name is a key of SPECS in specs.py.
#define CASTIRON_KERNEL(name, Params, ...)                                                    \
    static const ::castiron::Registration CASTIRON_JOIN(castiron_registration_, __COUNTER__)( \
        name, &::castiron::kernel_entry<::castiron::Params, __VA_ARGS__>, sizeof(::castiron::Params))

struct Range {
    int64_t begin, end;
};

// This thread's part of `count` equal items: consecutive, and all threads' parts together cover them once.
inline Range share(int64_t count, const Context &context) {
    return {count * context.thread / context.num_threads, count * (context.thread + 1) / context.num_threads};
}

// Live rows of a dimension; `count` is a Count.
inline int64_t live_count(int32_t count, const Context &context) { return context.header[count]; }

}  // namespace castiron
