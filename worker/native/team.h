// Threads that share one loop after the other.
//
// A loop is over when all of it is done, whoever did it: nobody has to arrive. A thread whose core
// somebody else has for a while, as the router has it beside an engine on CPUs, is waited for only
// where it holds a part of the loop that is on; those that were over meanwhile it passes by. OpenMP's
// loops end when every thread was there, some milliseconds later then.

#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>

// Hidden: libraries have functions of the same names.
namespace [[gnu::visibility("hidden")]] team {

using size = std::int64_t;

class Team {
  friend class Member;

  // Before a thread sleeps: some microseconds, which two loops of a step are apart.
  static constexpr int LOOKS = 500;
  static constexpr int LINE = 64;

  // Which loop is on, in the lower half, and how much of it was taken: that no thread takes from one
  // that is over.
  using State = std::uint64_t;
  using Loop = std::uint32_t;
  static constexpr int HALF = 32;

  alignas(LINE) std::atomic<State> state{0};
  alignas(LINE) std::atomic<size> done{0};  // of the loop that is on
  alignas(LINE) std::atomic<int> asleep{0};

  bool is_on(Loop loop) const { return Loop(state.load(std::memory_order_acquire)) == loop; }

  // The first of up to `together`; `number` where there is none left.
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

  // On the lower half, which comes first on the machines that there are.
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

// A thread of a team. All share the same loops, in the same order.
class Member {
 public:
  const int threads;

  Member(Team& team, int threads) : threads(threads), team(team) {}

  // Calls each(i) once for every i below `number`, which is less than 2^31; a thread takes `together`.
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

  // Calls it in one of the threads.
  template <class Call>
  void once(const Call& call) {
    share(1, 1, [&](size) { call(); });
  }

 private:
  Team& team;
  Team::Loop loop = 0;
};

// Calls work(member) in each of so many threads.
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
