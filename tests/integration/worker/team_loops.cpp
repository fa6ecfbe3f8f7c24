// Loops of a team, and whether each of their parts was done once, and before the next loop began.

#include "../../../worker/native/team.h"

#include <memory>

namespace {

using team::size;

// Changed by whoever has the part, so that a loop that began too early sees what it should not.
struct Parts {
  size number;
  std::unique_ptr<size[]> loops;

  explicit Parts(size number) : number(number), loops(new size[number]()) {}

  bool all_at(size loop) const {
    return std::all_of(loops.get(), loops.get() + number, [=](size each) { return each == loop; });
  }
};

// So that parts are not done in the order in which they are taken, and threads sleep.
void tarry(size loop, size part) {
  for (volatile size i = 0; i < (loop * 7919 + part * 104729) % 4096; i = i + 1) {
  }
}

}  // namespace

extern "C" {

// How often it went wrong in so many loops over [0, number), each after one that is done once.
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
