// Products with bfloat16 weights on a CPU with AVX-512 BF16, summed in fp32.
//
// A weight [outputs, inputs] lies in panels of WIDTH outputs, one after the other, each so that a
// walk over the inputs reads it from its first byte to its last:
//
//     [outputs / WIDTH][inputs / 2][WIDTH][2]
//
// which is what VDPBF16PS takes: of 16 outputs, two inputs each. The last panel is filled up with
// outputs of zero. One panel goes to one thread, which takes it from memory once for CHUNK rows and
// from its cache for every further tile of them.
//
// Each sum is made in the order of the inputs, however many rows there are: a row's result is the
// same in any batch.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

namespace {

using bf16 = std::uint16_t;
using pair = std::uint32_t;
using size = std::int64_t;

constexpr size WIDTH = 64;
constexpr size LANES = 16;
constexpr int VECTORS = WIDTH / LANES;
// Rows of a tile: its sums, a panel's vectors and an input fill the 32 registers.
constexpr size TILE = 6;
constexpr size CHUNK = 16 * TILE;

struct Product {
  const bf16* x;       // [rows, inputs]
  const bf16* panels;
  const bf16* bias;    // [outputs], or null
  bf16* y;             // [rows, outputs]
  size rows, outputs, inputs;
};

__m512 widened(const bf16* from, __mmask16 lanes) {
  const __m256i narrow = _mm256_maskz_loadu_epi16(lanes, from);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

// ROWS rows from `row` on, times the panel whose first output is `output`.
template <int ROWS>
void tile(const Product& p, size row, size output) {
  __m512 sums[ROWS][VECTORS] = {};
  const bf16* x = p.x + row * p.inputs;
  const bf16* panel = p.panels + output * p.inputs;
  for (size i = 0; i < p.inputs; i += 2, panel += 2 * WIDTH) {
    __m512bh weights[VECTORS];
    for (int v = 0; v < VECTORS; ++v)
      weights[v] = (__m512bh)_mm512_loadu_si512(panel + v * 2 * LANES);
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
      _mm256_mask_storeu_epi16(p.y + (row + r) * p.outputs + first, lanes,
                               (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(sums[r][v], bias)));
  }
}

using Tile = void (*)(const Product&, size, size);
constexpr Tile TILES[TILE] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

// Rows [row, end) in tiles of about the same size: seven are four and three, not six and one.
void chunk(const Product& p, size row, size end, size output) {
  while (row < end) {
    const size tiles = (end - row + TILE - 1) / TILE;
    const size rows = (end - row + tiles - 1) / tiles;
    TILES[rows - 1](p, row, output);
    row += rows;
  }
}

}  // namespace

extern "C" {

// Brings weight [outputs, inputs] into panels, in its own memory; outputs are a multiple of WIDTH,
// inputs even.
void pack(bf16* weight, size outputs, size inputs, int threads) {
#pragma omp parallel num_threads(threads)
  {
    const size pairs = inputs / 2;
    const std::unique_ptr<pair[]> rows(new pair[WIDTH * pairs]);
#pragma omp for
    for (size output = 0; output < outputs; output += WIDTH) {
      bf16* panel = weight + output * inputs;
      std::memcpy(rows.get(), panel, WIDTH * pairs * sizeof(pair));
      for (size i = 0; i < pairs; ++i)
        for (size o = 0; o < WIDTH; ++o)
          std::memcpy(panel + 2 * (i * WIDTH + o), &rows[o * pairs + i], sizeof(pair));
    }
  }
}

// y = x @ weight.T + bias
void multiply(const bf16* x, const bf16* panels, const bf16* bias, bf16* y, size rows,
              size outputs, size inputs, int threads) {
  const Product product{x, panels, bias, y, rows, outputs, inputs};
  const size chunks = (rows + CHUNK - 1) / CHUNK;
  const size tasks = (outputs + WIDTH - 1) / WIDTH * chunks;
#pragma omp parallel for num_threads(threads)
  for (size task = 0; task < tasks; ++task) {
    const size row = task % chunks * CHUNK;
    chunk(product, row, std::min(rows, row + CHUNK), task / chunks * WIDTH);
  }
}

}  // extern "C"
