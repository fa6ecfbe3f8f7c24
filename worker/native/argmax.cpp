// Argmax of each row of logits, on a CPU.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "team.h"

namespace {

using team::size;

// Markers, with the values of worker/native/argmax.py.
constexpr size NOT_FINITE = -1, NOTHING_LEFT = -2;

constexpr size LANES = 64;
// Elements per block. The position of the largest element is searched only in the block that has it.
constexpr size BLOCK = 16 * LANES;
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// Returns the largest of up to BLOCK elements. NaN is ignored, but sets `unordered`.
float largest(const float* x, size number, bool& unordered) {
  float most[LANES];
  std::int32_t nans[LANES] = {};
  std::fill_n(most, LANES, LOWEST);
  size i = 0;
  for (; i + LANES <= number; i += LANES)
    for (size lane = 0; lane < LANES; ++lane) {
      const float value = x[i + lane];
      most[lane] = value > most[lane] ? value : most[lane];
      nans[lane] |= value != value;
    }
  for (size lane = 0; i < number; ++i, ++lane) {
    most[lane] = x[i] > most[lane] ? x[i] : most[lane];
    nans[lane] |= x[i] != x[i];
  }
  unordered |= std::any_of(nans, nans + LANES, [](std::int32_t is_nan) { return is_nan; });
  return *std::max_element(most, most + LANES);
}

struct Largest {
  float value = LOWEST;
  size at = NOTHING_LEFT;

  Largest(const float* row, size width) {
    bool unordered = false;
    const float* block = row;
    for (const float* next = row; next < row + width; next += BLOCK) {
      const float most = largest(next, std::min(BLOCK, row + width - next), unordered);
      if (most > value) value = most, block = next;
    }
    if (unordered) value = std::numeric_limits<float>::quiet_NaN();
    if (std::isfinite(value)) at = std::find(block, row + width, value) - row;
    else if (value != LOWEST) at = NOT_FINITE;
  }
};

}  // namespace

extern "C" {

// Writes the largest logit of each of `rows` rows, and the first position where it is, or a marker. Rows have
// `width` elements and are `stride` elements apart.
[[gnu::visibility("default")]] void largest_of_rows(const float* logits, size stride, float* values,
                                                    size* places, size rows, size width,
                                                    int threads) {
  team::gather(threads, [&](team::Member& me) {
    me.share(rows, 1, [&](size row) {
      const Largest found(logits + row * stride, width);
      values[row] = found.value;
      places[row] = found.at;
    });
  });
}

}  // extern "C"
