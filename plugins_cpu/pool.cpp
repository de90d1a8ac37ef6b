#include "pool.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#endif

namespace castiron {
namespace {

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int64_t nanoseconds_now() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

#if defined(__linux__)
void sleep_while(std::atomic<uint32_t> &word, uint32_t seen) {
    // returns at once if the word has moved; spurious returns are fine, the caller looks again
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t> &word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr,
            0);
}
#else
std::mutex sleep_mutex;
std::condition_variable sleep_condition;

void sleep_while(std::atomic<uint32_t> &word, uint32_t seen) {
    std::unique_lock<std::mutex> lock(sleep_mutex);
    sleep_condition.wait(lock, [&] { return word.load() != seen; });
}
void wake_all(std::atomic<uint32_t> &) {
    std::lock_guard<std::mutex> lock(sleep_mutex);
    sleep_condition.notify_all();
}
#endif

// Failure is not fatal: the thread then runs wherever the system puts it.
void pin_this_thread(int32_t core) {
#if defined(__linux__)
    if (core < 0 || core >= CPU_SETSIZE) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
#else
    (void)core;
#endif
}

// Distinct processors the pool's threads may run on at the same time.
int32_t num_usable_cores(const std::vector<int32_t> &cores) {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        if (cores.empty()) return CPU_COUNT(&set);
        std::vector<int32_t> distinct;
        for (int32_t core : cores) {
            bool usable = core >= 0 && core < CPU_SETSIZE && CPU_ISSET(core, &set);
            if (usable && std::find(distinct.begin(), distinct.end(), core) == distinct.end()) {
                distinct.push_back(core);
            }
        }
        return static_cast<int32_t>(distinct.size());
    }
#endif
    (void)cores;
    return static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace

void Signal::advance() {
    // sequentially consistent with the sleeper's count: either the sleeper sees the new value or we see it
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_all(value_);
}

void Signal::wait_past(uint32_t seen, int64_t spin_nanoseconds) {
    if (value() != seen) return;
    if (spin_nanoseconds > 0) {
        const int64_t deadline = nanoseconds_now() + spin_nanoseconds;
        do {
            for (int i = 0; i < 32; ++i) {
                pause_cpu();
                if (value() != seen) return;
            }
        } while (nanoseconds_now() < deadline);
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (value_.load(std::memory_order_seq_cst) == seen) sleep_while(value_, seen);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace castiron

using castiron::Context;

CiPool::CiPool(int32_t num_threads, const int32_t *cores) : num_threads_(num_threads) {
    if (cores) cores_.assign(cores, cores + num_threads);
    // threads sharing a processor would spin away the time the others need to arrive
    if (castiron::num_usable_cores(cores_) < num_threads) spin_nanoseconds_ = 0;
    try {
        for (int32_t i = 0; i < num_threads; ++i) {
            void *memory =
                std::aligned_alloc(64, castiron::kScratchBytes);  // pages come with the first touch
            if (!memory) throw std::bad_alloc();
            scratch_.push_back(static_cast<char *>(memory));
        }
        for (int32_t i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (...) {
        stop();
        throw;
    }
}

CiPool::~CiPool() { stop(); }

void CiPool::stop() {
    stopping_ = true;
    start_.advance();
    for (std::thread &worker : workers_) worker.join();
    for (char *memory : scratch_) std::free(memory);
}

void CiPool::work(int32_t thread) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "castiron-worker");
#endif
    if (!cores_.empty()) castiron::pin_this_thread(cores_[thread]);
    for (uint32_t seen = 0;;
         ++seen) {  // start_ moves once a run, and no run begins before all threads are done
        start_.wait_past(seen, spin_nanoseconds_);
        if (stopping_) return;
        run_share(thread);
        arrive();
    }
}

void CiPool::run(const CiRecord *records, uint32_t num_records, const int32_t *header) {
    std::lock_guard<std::mutex> lock(run_mutex_);
    records_ = records;
    num_records_ = num_records;
    header_ = header;
    if (num_threads_ == 1) return run_share(0);
    leave_worker_core();
    start_.advance();
    run_share(0);
    barrier();
}

void CiPool::run_share(int32_t thread) {
    const Context context{thread, num_threads_, header_, scratch_[thread]};
    for (uint32_t i = 0; i < num_records_; ++i) {
        const CiRecord &record = records_[i];
        if ((record.flags & castiron::kBarrierFlag) && i > 0 && num_threads_ > 1) barrier();
        record.fn(record.params, context);
    }
}

bool CiPool::arrive() {
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) != num_threads_ - 1) return false;
    arrived_.store(0, std::memory_order_relaxed);
    opened_.advance();
    return true;
}

void CiPool::barrier() {
    const uint32_t seen = opened_.value();  // can't move before this thread has arrived
    if (!arrive()) opened_.wait_past(seen, spin_nanoseconds_);
}

// The caller isn't pinned, it has a life outside the pool. But if it happens to sit on a worker's processor
// it is moved to its own once; the system leaves it there as long as the workers are busy.
void CiPool::leave_worker_core() {
#if defined(__linux__)
    if (cores_.empty()) return;
    auto is_worker_core = [&](int32_t core) {
        return std::find(cores_.begin() + 1, cores_.end(), core) != cores_.end();
    };
    if (!is_worker_core(sched_getcpu()) || is_worker_core(cores_[0])) return;
    cpu_set_t before;
    if (pthread_getaffinity_np(pthread_self(), sizeof(before), &before) != 0) return;
    castiron::pin_this_thread(cores_[0]);
    pthread_setaffinity_np(pthread_self(), sizeof(before), &before);
#endif
}
