// Runs two stages of independent chunks on XLA's own thread pool.
//
// Threads claim chunks from atomic counters. The caller works too, and waits only for chunks that
// another thread has begun: a helper that the pool starts late finds nothing left and touches only
// the shared counters. So a busy pool, or one core, costs nothing but the parallelism.
#ifndef SYSTOLE_TEAM_H_
#define SYSTOLE_TEAM_H_

#include <atomic>
#include <cstdint>
#include <memory>

#include "placement.h"
#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace systole {

// Flushes denormals while in scope: every thread then rounds alike, whatever its owner had set.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  FlushDenormals() {}
#endif
};

// Chunks [0, size), split evenly into ranges. A thread claims those of its own range in order, then
// what the others have left: it mostly goes on where it was, which is what prefetching needs.
class Stage {
 public:
  static constexpr int32_t kMaxRanges = 8;

  Stage(int32_t size, int32_t num_ranges)
      : size_(size), num_ranges_(num_ranges < kMaxRanges ? num_ranges : kMaxRanges) {
    for (int32_t r = 0; r < num_ranges_; ++r) ranges_[r].next = begin_of(r);
  }

  // Runs chunks until none is left to claim.
  template <typename F>
  void run(int32_t thread, const F& body) {
    for (int32_t i = 0; i < num_ranges_; ++i) {
      const int32_t range = (thread + i) % num_ranges_;
      run_range(ranges_[range].next, begin_of(range + 1), body);
    }
  }

  // Returns once every chunk has ended. Spins for a moment (chunks are short), then sleeps.
  void wait() const {
    for (int spin = 0; spin < 4096; ++spin) {
      if (done_.load(std::memory_order_acquire) >= size_) return;
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
    for (int32_t done; (done = done_.load(std::memory_order_acquire)) < size_;) {
      done_.wait(done, std::memory_order_acquire);
    }
  }

 private:
  struct alignas(64) Range {
    std::atomic<int32_t> next;
  };

  int32_t begin_of(int32_t range) const {
    return static_cast<int32_t>(static_cast<int64_t>(size_) * range / num_ranges_);
  }

  template <typename F>
  void run_range(std::atomic<int32_t>& next, int32_t end, const F& body) {
    for (;;) {
      const int32_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= end) return;
      body(i);
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) done_.notify_all();
    }
  }

  const int32_t size_;
  const int32_t num_ranges_;
  Range ranges_[kMaxRanges];
  alignas(64) std::atomic<int32_t> done_{0};
};

// Calls first(i) for i in [0, num_first), then second(i) for i in [0, num_second), with at most
// `num_helpers` threads of the pool beside the caller. Every first(i) has ended before any second.
// With `is_contiguous` each thread keeps to neighbouring chunks of the second stage while it can; else
// chunks begin in order, which suits costs that differ.
template <typename First, typename Second>
void run_stages(xla::ffi::ThreadPool pool, int64_t num_helpers, int32_t num_first, const First& first,
                int32_t num_second, const Second& second, bool is_contiguous = false) {
  struct State {
    Stage first, second;
    State(int32_t a, int32_t b, int32_t num_ranges) : first(a, 1), second(b, num_ranges) {}
  };
  const int32_t num_ranges = is_contiguous ? static_cast<int32_t>(num_helpers) + 1 : 1;
  const auto state = std::make_shared<State>(num_first, num_second, num_ranges);
  const auto work = [&first, &second](State& stages, int32_t thread) {
    const FlushDenormals flush;
    stages.first.run(thread, first);
    stages.first.wait();
    stages.second.run(thread, second);
  };
  const int core = current_core();
  for (int32_t thread = 1; thread <= num_helpers; ++thread) {
    pool.Schedule([state, work, thread, core] {
      leave_core(core);
      work(*state, thread);
    });
  }
  work(*state, 0);
  state->second.wait();
}

}  // namespace systole

#endif  // SYSTOLE_TEAM_H_
