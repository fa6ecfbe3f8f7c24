// Products on a CPU, summed in fp32: y = x @ weight.T + bias.
//
// A weight [outputs, inputs] lies in panels of WIDTH outputs, one after the other, each so that a
// walk over the inputs reads it from its first byte to its last:
//
//     [outputs / WIDTH][inputs / PACK][WIDTH][PACK]
//
// PACK elements fill 32 bits: two of bfloat16, as the CPU may multiply them, one of fp32, or four of int8,
// which stand for themselves times the scale of their output. The last panel is filled up with outputs
// of zero, and the last PACK with inputs of zero. One panel goes to one
// thread, which takes it from memory once for CHUNK rows and from its cache for every further tile of
// them; meanwhile its next panel comes. Threads take panels as they get on: one whose core is busy
// with something else delays the others by no more than its panel.
//
// Each sum is made in the order of the inputs, however many rows there are: a row's result is the
// same in any batch.
//
// The members of a team call multiply together, and share the panels.
//
// Compiled for a type of weights (WEIGHTS_BFLOAT16, WEIGHTS_INT8, else fp32) and of inputs and outputs (element.h).

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../native/element.h"
#include "../native/team.h"
#include "../native/vector.h"

// Hidden: libraries for another type or head dimension have functions of the same names.
namespace [[gnu::visibility("hidden")]] panels {

using element::Stored;
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
// Outputs of a panel.
constexpr size WIDTH = VECTORS * LANES;
// Most rows of a tile: its sums, the vectors of weights and one of inputs fill the registers.
constexpr int TILE = 6;
constexpr size CHUNK = 16 * TILE;
// Packs of inputs that one turn of the innermost loop multiplies.
constexpr int UNROLLED = 4;
constexpr size LINE = 64;
// Of a panel, for each pack of inputs.
constexpr size PACK_BYTES = WIDTH * PACK * sizeof(Weight);
constexpr size LINES = (PACK_BYTES + LINE - 1) / LINE;
// Two panels of so many bytes are 1 MiB, what the smallest second level of cache of these CPUs has.
constexpr size MOST_BYTES_FETCHED = 512 << 10;

static_assert(TILE * VECTORS + VECTORS + 1 <= vector::REGISTERS);

// Out is Stored or float.
template <class Out>
struct Product {
  const Stored* x;       // [rows, inputs]
  const Weight* panels;
  const float* scales;   // [outputs] for int8, else null
  const Stored* bias;    // [outputs], or null
  Out* y;                // [rows, outputs]
  size rows, outputs, inputs;

  size packs() const { return (inputs + PACK - 1) / PACK; }
};

// What is to be in the cache soon: `lines` for each UNROLLED packs of inputs that are multiplied.
struct Ahead {
  const char* next;
  size lines;

  void fetch() {
    for (size i = 0; i < lines; ++i, next += LINE) __builtin_prefetch(next, 0, 2);
  }
};

// sums += x times the pack of weights at `weights`; `inputs` of it are multiplied.
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

// At `to`, which has `number` elements from there on, may be fewer than LANES.
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

// The first `number` at `from`, then zeros.
template <class Element>
inline Floats some(const Element* from, size number) {
  Floats values{};
  for (size i = 0; i < std::min<size>(number, LANES); ++i) values[i] = element::wide(from[i]);
  return values;
}

// ROWS rows from `row` on, times the panel whose first output is `output`.
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
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; ++v) {
    const size first = output + v * LANES, left = p.outputs - first;
    if (left <= 0) break;
    const Floats bias = p.bias ? some(p.bias + first, left) : Floats{};
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      Floats sum = sums[r][v];
#if defined(WEIGHTS_INT8)
      sum *= some(p.scales + first, left);
#endif
      put(p.y + (row + r) * p.outputs + first, sum + bias, left);
    }
  }
}

template <class Out>
using Tile = void (*)(const Product<Out>&, size, size, Ahead&);
template <class Out>
constexpr Tile<Out> TILES[TILE] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

// Rows [row, end) in tiles of about the same size: seven are four and three, not six and one. Each
// fetches a part of the panel `next`, if that is another one and both fit into the second level of
// cache: the CPU alone would look ahead by a few lines only.
template <class Out>
void chunk(const Product<Out>& p, size row, size end, size output, const Weight* next) {
  size tiles = (end - row + TILE - 1) / TILE;
  const size bytes = p.packs() * PACK_BYTES;
  const bool fetches =
      next != p.panels + output * p.packs() * PACK && bytes <= MOST_BYTES_FETCHED;
  Ahead ahead{reinterpret_cast<const char*>(next), fetches ? (UNROLLED * LINES + tiles - 1) / tiles : 0};
  const char* const end_next = ahead.next + bytes;
  for (; tiles > 0; --tiles) {
    const size rows = (end - row + tiles - 1) / tiles;
    TILES<Out>[rows - 1](p, row, output, ahead);
    row += rows;
    if (ahead.next >= end_next) ahead.lines = 0;
  }
}

template <class Out>
void multiply(team::Member& me, const Product<Out>& p) {
  const size chunks = (p.rows + CHUNK - 1) / CHUNK;
  const size tasks = (p.outputs + WIDTH - 1) / WIDTH * chunks;
  me.share(tasks, 1, [&](size task) {
    const size row = task % chunks * CHUNK, output = task / chunks * WIDTH;
    // Which one will be this thread's next: so it is where all get on alike.
    const size next = std::min(task + me.threads, tasks - 1);
    chunk(p, row, std::min(p.rows, row + CHUNK), output,
          p.panels + next / chunks * WIDTH * p.packs() * PACK);
  });
}

// Of the weight in panels, [inputs].
inline void row(const Weight* panels, const float* scales, size output, size inputs, Stored* out) {
  const float scale = scales ? scales[output] : 1.0f;
  const size packs = (inputs + PACK - 1) / PACK;
  const Weight* first = panels + (output / WIDTH * WIDTH * packs + output % WIDTH) * PACK;
  for (size i = 0; i < inputs; ++i)
    out[i] = element::narrow(element::wide(first[i / PACK * WIDTH * PACK + i % PACK]) * scale);
}

}  // namespace panels
