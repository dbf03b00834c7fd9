// Runs two stages of independent chunks on XLA's own thread pool.
//
// Threads claim chunks from an atomic counter. The caller works too, and waits only for chunks that
// another thread has begun: a helper that the pool starts late finds nothing left and touches only
// the shared counters. So a busy pool, or one core, costs nothing but the parallelism.
#ifndef SYSTOLE_TEAM_H_
#define SYSTOLE_TEAM_H_

#include <atomic>
#include <cstdint>
#include <memory>

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

class Stage {
 public:
  explicit Stage(int32_t size) : size_(size) {}

  // Runs chunks until none is left to claim.
  template <typename F>
  void run(const F& body) {
    for (;;) {
      const int32_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= size_) return;
      body(i);
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) done_.notify_all();
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
  const int32_t size_;
  alignas(64) std::atomic<int32_t> next_{0};
  alignas(64) std::atomic<int32_t> done_{0};
};

// Calls first(i) for i in [0, num_first), then second(i) for i in [0, num_second), with at most
// `num_helpers` threads of the pool beside the caller. Every first(i) has ended before any second.
template <typename First, typename Second>
void run_stages(xla::ffi::ThreadPool pool, int64_t num_helpers, int32_t num_first, const First& first,
                int32_t num_second, const Second& second) {
  struct State {
    Stage first, second;
    State(int32_t a, int32_t b) : first(a), second(b) {}
  };
  const auto state = std::make_shared<State>(num_first, num_second);
  const auto work = [&first, &second](State& stages) {
    const FlushDenormals flush;
    stages.first.run(first);
    stages.first.wait();
    stages.second.run(second);
  };
  for (int64_t i = 0; i < num_helpers; ++i) {
    pool.Schedule([state, work] { work(*state); });
  }
  work(*state);
  state->second.wait();
}

}  // namespace systole

#endif  // SYSTOLE_TEAM_H_
