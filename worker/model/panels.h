// Matrix products on a CPU, summed in fp32: y = x @ weight.T + bias.
//
// A weight [outputs, inputs] is stored in consecutive panels of WIDTH outputs. A loop over the inputs
// reads a panel sequentially:
//
//     [outputs / WIDTH][inputs / PACK][WIDTH][PACK]
//
// PACK elements fill 32 bits: two of bfloat16, which some CPUs multiply in pairs, one of fp32, or four
// of int8, whose values must be multiplied by the scale of their output. The last panel is padded with
// zero outputs, and the last pack with zero inputs.
//
// One thread computes one panel. It reads the panel from memory once for CHUNK rows, and from its cache
// for every tile of rows after the first; meanwhile it prefetches its next panel. Threads take panels one
// at a time, so that a thread whose core is busy with other work delays the others by at most one panel.
//
// Each sum is added up in the order of the inputs, whatever the number of rows, so the result of a row
// has the same bits in any batch.
//
// All members of a team call multiply together, and divide the panels among themselves.
//
// Weights of a quantised checkpoint have 32-bit words of codes in place of the packs (quantised.h).
//
// Compiled for one type of weights (WEIGHTS_BFLOAT16, WEIGHTS_INT8, else fp32), one type of inputs and outputs
// (element.h), and one type of codes if there are quantised weights.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../native/element.h"
#include "../native/team.h"
#include "../native/vector.h"
#include "quantised.h"

// Hidden visibility, because libraries for other types or head dimensions define the same names.
namespace [[gnu::visibility("hidden")]] panels {

using element::Stored;
using quantised::Groups;
using vector::Floats;
using vector::Ints;
using vector::LANES;
using size = std::int64_t;

#if defined(WEIGHTS_BFLOAT16)
using Weight = element::Bfloat16;
#elif defined(WEIGHTS_INT8)
using Weight = std::int8_t;
#else
using Weight = float;
#endif

constexpr size PACK = 4 / sizeof(Weight);
constexpr int VECTORS = vector::REGISTERS / 8;
// Outputs per panel.
constexpr size WIDTH = VECTORS * LANES;
// Largest number of rows of a tile: its sums, the vectors of weights and one of inputs fill the registers.
constexpr int TILE = 6;
// Largest number of rows for which a panel is read from memory once.
constexpr size CHUNK = 16 * TILE;
// Packs of inputs per iteration of the innermost loop.
constexpr int UNROLLED = 4;
constexpr size LINE = 64;
// Bytes of a panel for each pack of inputs, and the cache lines that they fill.
constexpr size PACK_BYTES = WIDTH * PACK * sizeof(Weight);
constexpr size LINES = (PACK_BYTES + LINE - 1) / LINE;
// Largest panel that is prefetched. Two such panels are 1 MiB, the smallest L2 cache of these CPUs.
constexpr size MOST_BYTES_FETCHED = 512 << 10;
// Panels of a quantised weight that are multiplied by one row at a time. Each sum of products waits for the
// one before, and the vectors of one panel of an AVX2 CPU are too few to use that time.
constexpr int PANELS_OF_ROW = VECTORS < 4 ? 2 : 1;

static_assert(TILE * VECTORS + VECTORS + 1 <= vector::REGISTERS);

// One product; Out is Stored or float.
template <class Out>
struct Product {
  const Stored* x;       // [rows, inputs]
  const Weight* panels;
  const float* scales;   // [outputs] for int8, else null
  const Stored* bias;    // [outputs], or null
  Out* y;                // [rows, outputs]
  size rows, outputs, inputs;
  const Groups* groups;  // of a quantised weight, else null

  size packs() const { return groups ? groups->words : (inputs + PACK - 1) / PACK; }
  size panels_of_task() const { return groups && rows == 1 ? PANELS_OF_ROW : 1; }
  size chunks() const { return (rows + CHUNK - 1) / CHUNK; }
  size tasks() const;
  const Weight* panel(size task) const;
  void compute(size task, const Weight* next) const;
};

// Memory to prefetch: `lines` cache lines for each UNROLLED packs of inputs that are multiplied.
struct Ahead {
  const char* next;
  size lines;

  void fetch() {
    for (size i = 0; i < lines; ++i, next += LINE) __builtin_prefetch(next, 0, 2);
  }
};

// sums += x times the pack of weights at `weights`, of which the first INPUTS inputs are multiplied.
#if defined(WEIGHTS_BFLOAT16) && defined(BFLOAT16) && defined(PAIRS)

inline std::uint32_t inputs_of(const Stored* x, int inputs) {
  std::uint32_t two = 0;
  std::memcpy(&two, x, inputs * sizeof *x);
  return two;
}

template <int INPUTS, int ROWS>
inline void add(Floats (&sums)[ROWS][VECTORS], const Stored* x, size stride, const Weight* weights) {
  vector::Pairs lanes[VECTORS];
  for (int v = 0; v < VECTORS; ++v)
    lanes[v] = vector::loaded<vector::Pairs>(weights + v * LANES * PACK);
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
    const std::uint32_t two = inputs_of(x + r * stride, INPUTS);
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = vector::dot(two, lanes[v], sums[r][v]);
  }
}

#else

template <int INPUTS, int ROWS>
inline void add(Floats (&sums)[ROWS][VECTORS], const Stored* x, size stride, const Weight* weights) {
#pragma GCC unroll 4
  for (int input = 0; input < INPUTS; ++input) {
    Floats lanes[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
#if defined(WEIGHTS_BFLOAT16)
      const Ints two = vector::loaded<Ints>(weights + v * LANES * PACK);
      lanes[v] = (Floats)(input ? two & std::int32_t(0xffff0000) : two << 16);
#elif defined(WEIGHTS_INT8)
      const Ints four = vector::loaded<Ints>(weights + v * LANES * PACK);
      lanes[v] = __builtin_convertvector(four << (24 - 8 * input) >> 24, Floats);
#else
      lanes[v] = vector::loaded<Floats>(weights + v * LANES);
#endif
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const Floats factor = vector::spread(element::wide(x[r * stride + input]));
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v)
        sums[r][v] = vector::multiply_add(factor, lanes[v], sums[r][v]);
    }
  }
}

#endif

// Stores values at `to`, which has room for `number` elements; these may be fewer than LANES.
inline void put(float* to, Floats values, size number) {
  if (number >= LANES) return vector::store(to, values);
  for (size i = 0; i < number; ++i) to[i] = values[i];
}

inline void put(element::Bfloat16* to, Floats values, size number) {
#if defined(__AVX512BF16__)
  const __mmask16 lanes = number >= LANES ? 0xffff : (1u << number) - 1;
  _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh((__m512)values));
#else
  for (size i = 0; i < std::min<size>(number, LANES); ++i) element::narrow(values[i], to[i]);
#endif
}

#ifdef HAS_HALF
inline void put(element::Half* to, Floats values, size number) {
  for (size i = 0; i < std::min<size>(number, LANES); ++i) element::narrow(values[i], to[i]);
}
#endif

// The first `number` elements at `from`, but at most LANES, followed by zeros.
template <class Element>
inline Floats some(const Element* from, size number) {
  Floats values{};
  for (size i = 0; i < std::min<size>(number, LANES); ++i) values[i] = element::wide(from[i]);
  return values;
}

// Adds the bias to sums, and stores them as the outputs of the panel whose first output is `output`.
template <int ROWS, int ALL, class Out>
void finish(const Product<Out>& p, const Floats (&sums)[ROWS][ALL], size row, size output) {
#pragma GCC unroll 4
  for (int v = 0; v < ALL; ++v) {
    const size first = output + v * LANES, left = p.outputs - first;
    if (left <= 0) break;
    const Floats bias = p.bias ? some(p.bias + first, left) : Floats{};
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
      put(p.y + (row + r) * p.outputs + first, sums[r][v] + bias, left);
  }
}

// Multiplies ROWS rows, from `row` on, by the panel whose first output is `output`.
template <int ROWS, class Out>
void tile(const Product<Out>& p, size row, size output, Ahead& ahead) {
  Floats sums[ROWS][VECTORS] = {};
  const Stored* x = p.x + row * p.inputs;
  const Weight* weights = p.panels + output * p.packs() * PACK;
  const Stored* const end = x + p.inputs / PACK * PACK;
  for (; x + UNROLLED * PACK <= end; x += UNROLLED * PACK, weights += UNROLLED * WIDTH * PACK) {
    ahead.fetch();
#pragma GCC unroll 8
    for (int i = 0; i < UNROLLED; ++i)
      add<PACK>(sums, x + i * PACK, p.inputs, weights + i * WIDTH * PACK);
  }
  for (; x < end; x += PACK, weights += WIDTH * PACK) add<PACK>(sums, x, p.inputs, weights);
  switch (p.inputs % PACK) {
    case 1: add<1>(sums, x, p.inputs, weights); break;
    case 2: if constexpr (PACK > 2) add<2>(sums, x, p.inputs, weights); break;
    case 3: if constexpr (PACK > 2) add<3>(sums, x, p.inputs, weights); break;
  }
#if defined(WEIGHTS_INT8)
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; ++v) {
    const Floats scale = some(p.scales + output + v * LANES, p.outputs - output - v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) sums[r][v] *= scale;
  }
#endif
  finish(p, sums, row, output);
}

#if defined(QUANTISED_INT8) || defined(QUANTISED_INT4) || defined(QUANTISED_E4M3) || defined(QUANTISED_E2M1)

// sums -= zero points times the sum of a group's inputs x [rows, count].
template <int ALL>
void subtract_zeros(Floats (*sums)[ALL], size rows, const Groups& groups, size group, const Stored* x,
                    size stride, size count, size output) {
  Floats zeros[ALL];
  for (int v = 0; v < ALL; ++v) zeros[v] = -groups.zero(group, output + v * LANES);
  for (size r = 0; r < rows; ++r) {
    const Floats sum = vector::spread(quantised::sum(x + r * stride, count));
    for (int v = 0; v < ALL; ++v) sums[r][v] = vector::multiply_add(sum, zeros[v], sums[r][v]);
  }
}

// The same as `tile` for PANELS consecutive panels of a quantised weight.
template <int ROWS, int PANELS, class Out>
void quantised_tile(const Product<Out>& p, size row, size output, Ahead& ahead) {
  using quantised::CODES;
  constexpr int ALL = PANELS * VECTORS;
  const Groups& groups = *p.groups;
  const size panel = groups.words * WIDTH;
  Floats totals[ROWS][ALL] = {};
  const Stored* x = p.x + row * p.inputs;
  const auto* words = reinterpret_cast<const quantised::Word*>(p.panels) + output * groups.words;
  for (size group = 0, done = 0; done < groups.inputs; ++group) {
    const size count = groups.count(group, done), rest = count % CODES;
    const Stored* const begin = x;
    const Stored* const end = x + (count - rest);
    Floats sums[ROWS][ALL] = {};
    for (; x + UNROLLED * CODES <= end; x += UNROLLED * CODES, words += UNROLLED * WIDTH) {
      ahead.fetch();
#pragma GCC unroll 8
      for (int i = 0; i < UNROLLED; ++i)
        quantised::add<VECTORS>(sums, x + i * CODES, p.inputs, words + i * WIDTH, panel);
    }
    for (; x < end; x += CODES, words += WIDTH) quantised::add<VECTORS>(sums, x, p.inputs, words, panel);
    if (rest) {
      Stored last[ROWS][CODES] = {};
      for (int r = 0; r < ROWS; ++r) std::memcpy(last[r], x + r * p.inputs, rest * sizeof *x);
      quantised::add<VECTORS>(sums, last[0], CODES, words, panel);
      x += rest, words += WIDTH;
    }
    if (groups.zeros) subtract_zeros(sums, ROWS, groups, group, begin, p.inputs, count, output);
#pragma GCC unroll 4
    for (int v = 0; v < ALL; ++v) {
      const Floats scale = groups.scale(group, output + v * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r)
        totals[r][v] = vector::multiply_add(scale, sums[r][v], totals[r][v]);
    }
    done += count;
  }
  finish(p, totals, row, output);
}

#ifdef DECODES

// Inputs whose weights are decoded at a time. They fill 8 KB, a quarter of an L1 cache.
constexpr size BLOCK = 2048 / WIDTH;
static_assert(BLOCK % quantised::CODES == 0);

// sums [ROWS] += x [ROWS, inputs] times weights [inputs].
template <int ROWS>
void add_block(Floats (*sums)[VECTORS], const Stored* x, size stride, const Floats (*weights)[VECTORS],
               size inputs) {
  Floats tile[ROWS][VECTORS];
  std::memcpy(tile, sums, sizeof tile);
  for (size input = 0; input < inputs; ++input) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const Floats factor = vector::spread(element::wide(x[r * stride + input]));
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v)
        tile[r][v] = vector::multiply_add(factor, weights[input][v], tile[r][v]);
    }
  }
  std::memcpy(sums, tile, sizeof tile);
}

// Multiplies rows [row, end) by one panel. The weights are decoded once for all rows, a block at a time. The
// operations on each sum, and so its bits, are those of `quantised_tile`.
template <class Out>
void quantised_chunk(const Product<Out>& p, size row, size end, size output, Ahead& ahead) {
  using quantised::CODES;
  using Add = void (*)(Floats (*)[VECTORS], const Stored*, size, const Floats (*)[VECTORS], size);
  constexpr Add ADDS[TILE] = {add_block<1>, add_block<2>, add_block<3>, add_block<4>, add_block<5>, add_block<6>};
  const Groups& groups = *p.groups;
  const size rows = end - row;
  Floats totals[CHUNK][VECTORS], sums[CHUNK][VECTORS], weights[BLOCK][VECTORS];
  std::memset(totals, 0, rows * sizeof *totals);
  const Stored* x = p.x + row * p.inputs;
  const auto* words = reinterpret_cast<const quantised::Word*>(p.panels) + output * groups.words;
  for (size group = 0, done = 0; done < groups.inputs; ++group) {
    const size count = groups.count(group, done);
    std::memset(sums, 0, rows * sizeof *sums);
    for (size first = 0; first < count; first += BLOCK) {
      const size inputs = std::min(BLOCK, count - first);
      for (size input = 0; input < inputs; input += CODES, words += WIDTH) {
        if (input % (UNROLLED * CODES) == 0) ahead.fetch();
        quantised::decode(words, weights + input);
      }
      for (size r = 0, tiles = (rows + TILE - 1) / TILE; tiles > 0; --tiles) {
        const size number = (rows - r + tiles - 1) / tiles;
        ADDS[number - 1](sums + r, x + r * p.inputs + first, p.inputs, weights, inputs);
        r += number;
      }
    }
    if (groups.zeros) subtract_zeros(sums, rows, groups, group, x, p.inputs, count, output);
    for (int v = 0; v < VECTORS; ++v) {
      const Floats scale = groups.scale(group, output + v * LANES);
      for (size r = 0; r < rows; ++r) totals[r][v] = vector::multiply_add(scale, sums[r][v], totals[r][v]);
    }
    x += count;
    done += count;
  }
  for (size r = 0; r < rows; ++r)
    finish(p, reinterpret_cast<const Floats (&)[1][VECTORS]>(totals[r]), row + r, output);
}

#endif

#define HAS_QUANTISED
#endif

template <class Out>
using Tile = void (*)(const Product<Out>&, size, size, Ahead&);
template <class Out>
constexpr Tile<Out> TILES[TILE] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

template <class Out>
const Tile<Out>* tiles_for(const Product<Out>& p) {
#ifdef HAS_QUANTISED
  static constexpr Tile<Out> QUANTISED_TILES[TILE] = {
      quantised_tile<1, 1>, quantised_tile<2, 1>, quantised_tile<3, 1>,
      quantised_tile<4, 1>, quantised_tile<5, 1>, quantised_tile<6, 1>};
  if (p.groups) return QUANTISED_TILES;
#endif
  return TILES<Out>;
}

// Multiplies rows [row, end) by one panel, in tiles of about equal size: seven rows are four and three,
// not six and one. Each tile prefetches a part of the panel `next`, if that is a different one and both
// fit into the L2 cache, because the CPU alone prefetches only a few lines ahead.
template <class Out>
void chunk(const Product<Out>& p, size row, size end, size output, const Weight* next) {
  size tiles = (end - row + TILE - 1) / TILE;
  const size bytes = p.panels_of_task() * p.packs() * PACK_BYTES;
  const bool fetches =
      next != p.panels + output * p.packs() * PACK && bytes <= MOST_BYTES_FETCHED;
  Ahead ahead{reinterpret_cast<const char*>(next), fetches ? p.panels_of_task() * UNROLLED * LINES : 0};
#ifdef HAS_QUANTISED
  if (p.panels_of_task() > 1 && output + WIDTH < p.outputs)
    return quantised_tile<1, PANELS_OF_ROW>(p, row, output, ahead);
#ifdef DECODES
  if (p.groups && tiles > 1) return quantised_chunk(p, row, end, output, ahead);
#endif
#endif
  ahead.lines = (ahead.lines + tiles - 1) / tiles;
  const char* const end_next = ahead.next + bytes;
  const Tile<Out>* const by_rows = tiles_for(p);
  for (; tiles > 0; --tiles) {
    const size rows = (end - row + tiles - 1) / tiles;
    by_rows[rows - 1](p, row, output, ahead);
    row += rows;
    if (ahead.next >= end_next) ahead.lines = 0;
  }
}

// A task is `panels_of_task` panels, or fewer at the end, and at most CHUNK rows. The tasks of a panel follow
// each other.
template <class Out>
size Product<Out>::tasks() const {
  const size width = panels_of_task() * WIDTH;
  return (outputs + width - 1) / width * chunks();
}

// First panel of a task.
template <class Out>
const Weight* Product<Out>::panel(size task) const {
  return panels + task / chunks() * panels_of_task() * WIDTH * packs() * PACK;
}

// Computes one task. `next` is the first panel of this thread's next task, which is prefetched.
template <class Out>
void Product<Out>::compute(size task, const Weight* next) const {
  const size row = task % chunks() * CHUNK, output = task / chunks() * panels_of_task() * WIDTH;
  chunk(*this, row, std::min(rows, row + CHUNK), output, next);
}

template <class Out>
void multiply(team::Member& me, const Product<Out>& p) {
  const size tasks = p.tasks();
  me.share(tasks, 1, [&](size task) {
    // Prediction of this thread's next panel, which is right if all threads advance at the same speed.
    p.compute(task, p.panel(std::min(task + me.threads, tasks - 1)));
  });
}

// Linear layer; `bias` may be null.
struct Linear {
  const Weight* panels;
  const float* scales;
  const Stored* bias;
  size outputs, inputs;
  Groups groups;

  template <class Out>
  Product<Out> product(const Stored* x, Out* y, size rows) const {
    return {x, panels, scales, bias, y, rows, outputs, inputs, groups.number ? &groups : nullptr};
  }

  template <class Out>
  void operator()(team::Member& me, const Stored* x, Out* y, size rows) const {
    multiply(me, product(x, y, rows));
  }
};

// Writes row `output` of the weight in panels to out [inputs].
inline void row(const Weight* panels, const float* scales, size output, size inputs, Stored* out) {
  const float scale = scales ? scales[output] : 1.0f;
  const size packs = (inputs + PACK - 1) / PACK;
  const Weight* first = panels + (output / WIDTH * WIDTH * packs + output % WIDTH) * PACK;
  for (size i = 0; i < inputs; ++i)
    out[i] = element::narrow(element::wide(first[i / PACK * WIDTH * PACK + i % PACK]) * scale);
}

}  // namespace panels
