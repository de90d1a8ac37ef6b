// Warpgroup matrix multiplies of sm_90a: d[64 rows, kTokens] (+)= a[64 rows, 16 k] . b[kTokens, 16 k]^T in
// f32, of bf16; of e4m3 with 32 k in the same bytes. A and B in shared memory are K-major images with
// 128-byte swizzle (rows of 64 bf16 = 128 bytes, 8-row groups of 1024 bytes one after another, 1024-byte
// aligned). A in registers is one m16 x k16 fragment per warp (warp w of the warpgroup holds rows 16w..), the
// fragment of mma.m16n8k16. Lane 4g + t of warp w holds of d:
//     d[4j], d[4j + 1]        row 16w + g,     columns 8j + 2t, 8j + 2t + 1
//     d[4j + 2], d[4j + 3]    row 16w + g + 8, the same columns
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
#pragma once
#include <stdint.h>

namespace castiron {

// Descriptor of such an image that starts at a shared-memory address. A step of 16 k adds 32 bytes = 2.
__device__ __forceinline__ uint64_t swizzled_descriptor(uint32_t address) {
    constexpr uint64_t kStride = 1024 >> 4;  // bytes between 8-row groups
    constexpr uint64_t kSwizzle128 = 1;
    return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(1) << 16 | kStride << 32 | kSwizzle128 << 62;
}

// Orders the registers that wgmma reads and adds to with other uses of them, and prior wgmmas.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending of this warp's committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define WGMMA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_D8(i) WGMMA_D4(i), WGMMA_D4(i + 4)
#define WGMMA_D16(i) WGMMA_D4(i), WGMMA_D4(i + 4), WGMMA_D4(i + 8), WGMMA_D4(i + 12)
#define WGMMA_D32(i) WGMMA_D16(i), WGMMA_D16(i + 16)
#define WGMMA_D64(i) WGMMA_D32(i), WGMMA_D32(i + 32)
#define WGMMA_D128(i) WGMMA_D64(i), WGMMA_D64(i + 64)

// clang-format off
#define WGMMA_REGISTERS_8 \
    "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_REGISTERS_16 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_REGISTERS_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_REGISTERS_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
    "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
    "%60, %61, %62, %63"
#define WGMMA_REGISTERS_128 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
    "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
    "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, " \
    "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, " \
    "%120, %121, %122, %123, %124, %125, %126, %127"

// The instructions of one width. Operands are numbered: d comes first, kI is "%" and a number behind it.
#define WGMMA_WIDTH(kTokens, kNumD, k0, k1, k2, k3, k4, k5) \
    template <> \
    struct Wgmma<kTokens> { \
        static __device__ __forceinline__ void shared(float (&d)[kNumD], uint64_t a, uint64_t b, int accumulate) { \
            asm volatile( \
                "{.reg .pred p; setp.ne.b32 p, " k2 ", 0;" \
                "wgmma.mma_async.sync.aligned.m64n" #kTokens "k16.f32.bf16.bf16 {" WGMMA_REGISTERS_##kNumD "}, " \
                k0 ", " k1 ", p, 1, 1, 0, 0;}" \
                : WGMMA_D##kNumD(0) : "l"(a), "l"(b), "r"(accumulate)); \
        } \
        static __device__ __forceinline__ void shared_e4m3(float (&d)[kNumD], uint64_t a, uint64_t b, int accumulate) { \
            asm volatile( \
                "{.reg .pred p; setp.ne.b32 p, " k2 ", 0;" \
                "wgmma.mma_async.sync.aligned.m64n" #kTokens "k32.f32.e4m3.e4m3 {" WGMMA_REGISTERS_##kNumD "}, " \
                k0 ", " k1 ", p, 1, 1;}" \
                : WGMMA_D##kNumD(0) : "l"(a), "l"(b), "r"(accumulate)); \
        } \
        static __device__ __forceinline__ void registers(float (&d)[kNumD], const uint32_t (&a)[4], uint64_t b, int accumulate) { \
            asm volatile( \
                "{.reg .pred p; setp.ne.b32 p, " k5 ", 0;" \
                "wgmma.mma_async.sync.aligned.m64n" #kTokens "k16.f32.bf16.bf16 {" WGMMA_REGISTERS_##kNumD "}, {" \
                k0 ", " k1 ", " k2 ", " k3 "}, " k4 ", p, 1, 1, 0;}" \
                : WGMMA_D##kNumD(0) \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)); \
        } \
    }

template <int kTokens>
struct Wgmma;  // accumulate = 0 overwrites d; shared_e4m3: 32 k of bytes, the images are the same
WGMMA_WIDTH(16, 8, "%8", "%9", "%10", "%11", "%12", "%13");
WGMMA_WIDTH(32, 16, "%16", "%17", "%18", "%19", "%20", "%21");
WGMMA_WIDTH(64, 32, "%32", "%33", "%34", "%35", "%36", "%37");
WGMMA_WIDTH(128, 64, "%64", "%65", "%66", "%67", "%68", "%69");
WGMMA_WIDTH(256, 128, "%128", "%129", "%130", "%131", "%132", "%133");
// clang-format on

}  // namespace castiron
