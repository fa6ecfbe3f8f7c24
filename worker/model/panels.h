// Products with bfloat16 weights on a CPU with AVX-512 BF16, summed in fp32.
//
// A weight [outputs, inputs] lies in panels of WIDTH outputs, one after the other, each so that a
// walk over the inputs reads it from its first byte to its last:
//
//     [outputs / WIDTH][inputs / 2][WIDTH][2]
//
// which is what VDPBF16PS takes: of 16 outputs, two inputs each. The last panel is filled up with
// outputs of zero. One panel goes to one thread, which takes it from memory once for CHUNK rows and
// from its cache for every further tile of them; meanwhile its next panel comes. Threads take panels
// as they get on: one whose core somebody else has holds up nobody for longer than its panel.
//
// Each sum is made in the order of the inputs, however many rows there are: a row's result is the
// same in any batch.
//
// The members of a team call multiply together, and share the panels.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../native/team.h"

// Hidden: libraries for another type or head dimension have functions of the same names.
namespace [[gnu::visibility("hidden")]] panels {

using bf16 = std::uint16_t;
using pair = std::uint32_t;
using size = std::int64_t;

constexpr size WIDTH = 64;
constexpr size LANES = 16;
constexpr int VECTORS = WIDTH / LANES;
// Rows of a tile: its sums, a panel's vectors and an input fill the 32 registers.
constexpr size TILE = 6;
constexpr size CHUNK = 16 * TILE;
constexpr size LINE = 64;
// Two panels of so many are 1 MiB, what the smallest second level of cache of these CPUs has.
constexpr size MOST_INPUTS_FETCHED = 4096;
// Of a panel, for each pair of inputs.
constexpr size LINES = 2 * WIDTH * sizeof(bf16) / LINE;

// Out is bf16 or float.
template <class Out>
struct Product {
  const bf16* x;       // [rows, inputs]
  const bf16* panels;
  const bf16* bias;    // [outputs], or null
  Out* y;              // [rows, outputs]
  size rows, outputs, inputs;
};

inline __m512 widened(const bf16* from, __mmask16 lanes) {
  const __m256i narrow = _mm256_maskz_loadu_epi16(lanes, from);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

inline void store(bf16* to, __mmask16 lanes, __m512 sums) {
  _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(sums));
}

inline void store(float* to, __mmask16 lanes, __m512 sums) { _mm512_mask_storeu_ps(to, lanes, sums); }

// What is to be in the cache soon: `lines` for each pair of inputs that is multiplied.
struct Ahead {
  const char* next;
  size lines;

  void fetch() {
    for (size i = 0; i < lines; ++i, next += LINE) __builtin_prefetch(next, 0, 2);
  }
};

// ROWS rows from `row` on, times the panel whose first output is `output`.
template <int ROWS, class Out>
void tile(const Product<Out>& p, size row, size output, Ahead& ahead) {
  __m512 sums[ROWS][VECTORS] = {};
  const bf16* x = p.x + row * p.inputs;
  const bf16* panel = p.panels + output * p.inputs;
  for (size i = 0; i < p.inputs; i += 2, panel += 2 * WIDTH) {
    __m512bh weights[VECTORS];
    for (int v = 0; v < VECTORS; ++v)
      weights[v] = (__m512bh)_mm512_loadu_si512(panel + v * 2 * LANES);
    ahead.fetch();
    for (int r = 0; r < ROWS; ++r) {
      pair two;
      std::memcpy(&two, x + r * p.inputs + i, sizeof two);
      const __m512bh inputs = (__m512bh)_mm512_set1_epi32(static_cast<int>(two));
      for (int v = 0; v < VECTORS; ++v)
        sums[r][v] = _mm512_dpbf16_ps(sums[r][v], inputs, weights[v]);
    }
  }
  for (int v = 0; v < VECTORS; ++v) {
    const size first = output + v * LANES, left = p.outputs - first;
    if (left <= 0) break;
    const __mmask16 lanes = left >= LANES ? 0xffff : (1u << left) - 1;
    const __m512 bias = p.bias ? widened(p.bias + first, lanes) : _mm512_setzero_ps();
    for (int r = 0; r < ROWS; ++r)
      store(p.y + (row + r) * p.outputs + first, lanes, _mm512_add_ps(sums[r][v], bias));
  }
}

template <class Out>
using Tile = void (*)(const Product<Out>&, size, size, Ahead&);
template <class Out>
constexpr Tile<Out> TILES[TILE] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

// Rows [row, end) in tiles of about the same size: seven are four and three, not six and one. A tile
// alone waits for memory anyway; of several, each fetches a part of the panel `next`, if that is
// another one and both fit into the second level of cache.
template <class Out>
void chunk(const Product<Out>& p, size row, size end, size output, const bf16* next) {
  size tiles = (end - row + TILE - 1) / TILE;
  const bool fetches =
      tiles > 1 && next != p.panels + output * p.inputs && p.inputs <= MOST_INPUTS_FETCHED;
  Ahead ahead{reinterpret_cast<const char*>(next), fetches ? (LINES + tiles - 1) / tiles : 0};
  const char* const end_next = ahead.next + LINES * LINE * (p.inputs / 2);
  for (; tiles > 0; --tiles) {
    const size rows = (end - row + tiles - 1) / tiles;
    TILES<Out>[rows - 1](p, row, output, ahead);
    row += rows;
    if (ahead.next >= end_next) ahead.lines = 0;
  }
}

// y = x @ weight.T + bias
template <class Out>
void multiply(team::Member& me, const Product<Out>& p) {
  const size chunks = (p.rows + CHUNK - 1) / CHUNK;
  const size tasks = (p.outputs + WIDTH - 1) / WIDTH * chunks;
  me.share(tasks, 1, [&](size task) {
    const size row = task % chunks * CHUNK, output = task / chunks * WIDTH;
    // Which one will be this thread's next: so it is where all get on alike.
    const size next = std::min(task + me.threads, tasks - 1);
    chunk(p, row, std::min(p.rows, row + CHUNK), output,
          p.panels + next / chunks * WIDTH * p.inputs);
  });
}

// Of the weight in panels, [inputs].
inline void row(const bf16* panels, size output, size inputs, bf16* out) {
  const bf16* first = panels + output / WIDTH * WIDTH * inputs + output % WIDTH * 2;
  for (size i = 0; i < inputs; i += 2, first += 2 * WIDTH) std::memcpy(out + i, first, sizeof(pair));
}

}  // namespace panels
