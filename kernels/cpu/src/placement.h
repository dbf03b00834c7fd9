// Keeps the threads of one piece of work from sharing a core.
//
// When every core is busy for an instant, the system wakes a helper on its caller's core and moves it
// away only milliseconds later; until then two threads have the speed of one. A helper that finds
// itself there asks to be moved, once, and is free to run anywhere again: unlike a pinned thread it
// never waits for a core that another program has taken.
#ifndef SYSTOLE_PLACEMENT_H_
#define SYSTOLE_PLACEMENT_H_

#if defined(__linux__)
#include <sched.h>

#include <chrono>
#endif

namespace systole {

#if defined(__linux__)

// The core that the calling thread runs on.
inline int current_core() { return sched_getcpu(); }

// Moves the calling thread away from `core` if it runs there and may run elsewhere. A move costs some
// 10 us and can be undone by the system at once, so there is at most one in a millisecond.
inline void leave_core(int core) {
  using Clock = std::chrono::steady_clock;
  thread_local Clock::time_point next_move;
  if (sched_getcpu() != core) return;
  const Clock::time_point now = Clock::now();
  if (now < next_move) return;
  next_move = now + std::chrono::milliseconds(1);
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  cpu_set_t others = allowed;
  CPU_CLR(core, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof(others), &others) != 0) return;
  sched_setaffinity(0, sizeof(allowed), &allowed);
}

#else

inline int current_core() { return -1; }
inline void leave_core(int) {}

#endif

}  // namespace systole

#endif  // SYSTOLE_PLACEMENT_H_
