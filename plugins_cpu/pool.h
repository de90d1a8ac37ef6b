// The library's threads: they walk the records of a plan together, the caller being one of them.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "abi.h"

namespace castiron {

constexpr uint32_t kBarrierFlag = 1;  // RecordFlag.BARRIER of runtime/plan_format.py
constexpr int64_t kSpinNanoseconds = 50'000;

// A counter that threads wait on: they spin for a while and then sleep until it moves.
class Signal {
  public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }
    void advance();  // publishes all earlier writes, wakes the waiters
    void wait_past(uint32_t seen, int64_t spin_nanoseconds);  // returns once value() != seen

  private:
    alignas(128) std::atomic<uint32_t> value_{0};
    std::atomic<uint32_t> sleepers_{0};
};

}  // namespace castiron

// One pool serves one caller at a time; a second ci_run on it waits for the first.
struct CiPool {
  public:
    // Throws std::system_error or std::bad_alloc if threads or memory are refused.
    CiPool(int32_t num_threads, const int32_t *cores);
    ~CiPool();
    CiPool(const CiPool &) = delete;
    CiPool &operator=(const CiPool &) = delete;

    void run(const CiRecord *records, uint32_t num_records, const int32_t *header);

  private:
    void stop();
    void work(int32_t thread);
    void run_share(int32_t thread);
    bool arrive();  // true for the last thread to come, which thereby opens the barrier
    void barrier();
    void leave_worker_core();

    const int32_t num_threads_;
    int64_t spin_nanoseconds_ = castiron::kSpinNanoseconds;
    std::vector<int32_t> cores_;  // empty: nothing is pinned
    std::vector<char *> scratch_;
    std::vector<std::thread> workers_;
    std::mutex run_mutex_;

    // the run in progress, written before start_ is advanced
    const CiRecord *records_ = nullptr;
    uint32_t num_records_ = 0;
    const int32_t *header_ = nullptr;
    bool stopping_ = false;

    castiron::Signal start_;
    castiron::Signal opened_;  // the barrier's phase
    alignas(128) std::atomic<int32_t> arrived_{0};
};
