// Team of threads that divide a sequence of loops among themselves.
//
// A loop ends when all its iterations are done, no matter which threads did them. No thread has to arrive at
// the end of the loop. A thread may lose its core for a while, for example to the router on a machine that
// has both. The others wait for it only if it holds iterations of the current loop, and it skips loops
// that ended in the meantime. OpenMP's loops instead end when every thread has arrived, which may be some
// milliseconds later.

#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>

// Hidden visibility, because several libraries define these names.
namespace [[gnu::visibility("hidden")]] team {

using size = std::int64_t;

class Team {
  friend class Member;

  // Number of checks before a thread sleeps. They take some microseconds, the usual time between two loops of
  // a step.
  static constexpr int LOOKS = 500;
  static constexpr int LINE = 64;

  // The number of the current loop in the lower half, and its number of taken iterations in the upper half.
  // Both are in one word so that no thread can take iterations of a loop that has ended.
  using State = std::uint64_t;
  using Loop = std::uint32_t;
  static constexpr int HALF = 32;

  alignas(LINE) std::atomic<State> state{0};
  alignas(LINE) std::atomic<size> done{0};  // finished iterations of the current loop
  alignas(LINE) std::atomic<int> asleep{0};

  bool is_on(Loop loop) const { return Loop(state.load(std::memory_order_acquire)) == loop; }

  // Takes up to `together` iterations and returns the first, or returns `number` if none is left.
  size take(Loop loop, size number, size together) {
    State seen = state.load(std::memory_order_acquire), more = State(together) << HALF;
    do {
      if (Loop(seen) != loop || size(seen >> HALF) >= number) return number;
    } while (!state.compare_exchange_weak(seen, seen + more, std::memory_order_acq_rel,
                                          std::memory_order_acquire));
    return size(seen >> HALF);
  }

  void finish(Loop loop, size some, size number) {
    if (done.fetch_add(some, std::memory_order_acq_rel) + some < number) return;
    done.store(0, std::memory_order_relaxed);
    state.store(Loop(loop + 1));
    if (asleep.load()) sleepers(FUTEX_WAKE_PRIVATE, INT_MAX);
  }

  void wait(Loop loop) {
    for (int looks = 0; looks < LOOKS; ++looks) {
      if (!is_on(loop)) return;
      pause();
    }
    ++asleep;
    while (is_on(loop)) sleepers(FUTEX_WAIT_PRIVATE, loop);
    --asleep;
  }

  // The futex is the lower half of `state`, which comes first on little-endian machines.
  void sleepers(int operation, std::uint32_t value) {
    syscall(SYS_futex, &state, operation, value, nullptr, nullptr, 0);
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
};

// Member of a team, one per thread. All members must call the same loops in the same order.
class Member {
 public:
  const int threads;

  Member(Team& team, int threads) : threads(threads), team(team) {}

  // Calls each(i) once for every i below `number`, which is less than 2^31. A thread takes up to `together`
  // iterations at a time. Returns when all iterations are done.
  template <class Each>
  void share(size number, size together, const Each& each) {
    if (number <= 0) return;
    for (size first; (first = team.take(loop, number, together)) < number;) {
      const size end = std::min(number, first + together);
      for (size i = first; i < end; ++i) each(i);
      team.finish(loop, end - first, number);
    }
    team.wait(loop++);
  }

  // Calls `call` in one of the threads, while the others wait.
  template <class Call>
  void once(const Call& call) {
    share(1, 1, [&](size) { call(); });
  }

 private:
  Team& team;
  Team::Loop loop = 0;
};

// Calls work(member) in each of `threads` threads.
template <class Work>
void gather(int threads, const Work& work) {
  Team team;
#pragma omp parallel num_threads(threads)
  {
    Member member(team, threads);
    work(member);
  }
}

}  // namespace team
