// What the library exports (abi.h): the kernel table, and the pool behind a C interface no exception crosses.
#include <cerrno>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "kernels/registry.h"
#include "pool.h"

#if defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define CI_EXPORT __attribute__((visibility("default")))

namespace castiron {
namespace {

constexpr int32_t kMaxThreads = 1024;

std::vector<CiKernelInfo> &kernel_table() {
    static std::vector<CiKernelInfo> table;  // filled by static objects while the library is loaded
    return table;
}

std::string &last_error() {
    static thread_local std::string message;
    return message;
}

// The system gives a process tile registers only on request, before the threads that use them start.
bool request_tiles() {
#if defined(__AMX_TILE__) && defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
        last_error() = std::string("the system refused AMX tile registers: ") + std::strerror(errno);
        return false;
    }
#endif
    return true;
}

}  // namespace

Registration::Registration(const char *name, KernelFn fn, uint32_t params_bytes) {
    kernel_table().push_back({name, fn, params_bytes});
}

}  // namespace castiron

extern "C" {

CI_EXPORT const char *ci_source_hash(void) { return CASTIRON_SOURCE_HASH; }
CI_EXPORT const char *ci_level(void) { return CASTIRON_LEVEL; }
CI_EXPORT uint32_t ci_num_kernels(void) { return static_cast<uint32_t>(castiron::kernel_table().size()); }
CI_EXPORT const CiKernelInfo *ci_kernels(void) { return castiron::kernel_table().data(); }
CI_EXPORT const char *ci_last_error(void) { return castiron::last_error().c_str(); }

CI_EXPORT CiPool *ci_pool_create(int32_t num_threads, const int32_t *cores) {
    try {
        castiron::last_error().clear();
        if (num_threads < 1 || num_threads > castiron::kMaxThreads) {
            castiron::last_error() = "got " + std::to_string(num_threads) + " threads, expected 1 to " +
                                     std::to_string(castiron::kMaxThreads);
            return nullptr;
        }
        if (!castiron::request_tiles()) return nullptr;
        return new CiPool(num_threads, cores);
    } catch (const std::exception &error) {
        castiron::last_error() = std::string("can't start threads: ") + error.what();
        return nullptr;
    }
}

CI_EXPORT void ci_pool_destroy(CiPool *pool) { delete pool; }

CI_EXPORT int32_t ci_run(CiPool *pool, const CiRecord *records, uint32_t num_records, const int32_t *header) {
    pool->run(records, num_records, header);
    return 0;
}

}  // extern "C"
