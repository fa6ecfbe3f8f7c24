// Checks that a team runs each part of its loops once, and before the next loop begins.

#include "../../../worker/native/team.h"

#include <memory>

namespace {

using team::size;

// Completed loops of each part; a loop that begins too early sees different numbers.
struct Parts {
  size number;
  std::unique_ptr<size[]> loops;

  explicit Parts(size number) : number(number), loops(new size[number]()) {}

  bool all_at(size loop) const {
    return std::all_of(loops.get(), loops.get() + number, [=](size each) { return each == loop; });
  }
};

// Delays parts by different times, so that they end out of order and threads sleep.
void tarry(size loop, size part) {
  for (volatile size i = 0; i < (loop * 7919 + part * 104729) % 4096; i = i + 1) {
  }
}

}  // namespace

extern "C" {

// Returns the number of errors in `loops` loops over [0, number), each after a call of `once`.
[[gnu::visibility("default")]] size wrong_loops(int threads, size loops, size number, size together) {
  Parts parts(number);
  std::atomic<size> wrong{0};
  size once = 0;
  team::gather(threads, [&](team::Member& me) {
    for (size loop = 0; loop < loops; ++loop) {
      me.once([&] {
        if (!parts.all_at(loop) || once != loop) ++wrong;
        once = loop + 1;
      });
      me.share(number, together, [&](size part) {
        if (once != loop + 1) ++wrong;
        tarry(loop, part);
        ++parts.loops[part];
      });
      me.share(0, 1, [&](size) { ++wrong; });
    }
  });
  if (!parts.all_at(loops) || once != loops) ++wrong;
  return wrong;
}

}  // extern "C"
