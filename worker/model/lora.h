// LoRA adapters on a CPU: y += scaling * B (A x) in a linear layer, for each row with the matrices of its
// adapter. Sums are in fp32.
//
// Rows are grouped by adapter, and a tile of at most TILE rows of one adapter reads its matrices together. The
// result of a row depends on that row and its adapter alone, and each of its sums has a fixed order. Its bits
// are thus the same in any batch. Rows without an adapter stay as they are.
//
// All members of a team call `update` together, and divide the tiles among themselves.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "panels.h"

// Hidden visibility, because libraries for other types or head dimensions define the same names.
namespace [[gnu::visibility("hidden")]] lora {

using element::Stored;
using element::wide;
using team::Member;
using vector::Floats;
using vector::LANES;
using size = std::int64_t;

// Rows of a tile.
constexpr int TILE = 4;
// Ranks of A that are multiplied at a time. The sums of a tile fill at most half of the registers.
constexpr int RANKS = vector::REGISTERS / 8;
// Outputs of B that are multiplied at a time.
constexpr int VECTORS = vector::REGISTERS / 8;
constexpr size OUTPUTS = VECTORS * LANES;
// Padding of the matrices, which worker/model/lora.py adds: ranks and inputs of A, and outputs of B.
constexpr size PADDED_RANKS = 4, PADDED_INPUTS = 16, PANEL = 64;

static_assert(PADDED_RANKS % RANKS == 0 && PADDED_INPUTS % LANES == 0 && PANEL % OUTPUTS == 0);

constexpr size padded(size number, size to) { return (number + to - 1) / to * to; }

// Structures that Python passes; worker/model/lora.py defines the same ones.

// Matrices of an adapter for consecutive outputs of a linear layer.
struct Part {
  const Stored* a;  // [ranks][inputs], padded with zeros
  const Stored* b;  // [outputs / PANEL][ranks][PANEL]; the last panel is padded with zeros
  size ranks, first, outputs;
  float scaling;

  size padded_ranks() const { return padded(ranks, PADDED_RANKS); }
};

struct Parts {
  const Part* parts;
  size number;
};

// Adapters of a linear layer.
struct Linear {
  const Parts* adapters;  // by number; those of number 0 are empty
  size inputs, outputs;
  size most_ranks;   // largest sum of the padded ranks of an adapter's parts
  size most_panels;  // largest sum of the panels of an adapter's parts
};

// Rows with an adapter, ordered by its number, and their tiles.
struct Rows {
  struct Tile {
    size adapter, first, number;
  };
  std::vector<size> rows;
  std::vector<Tile> tiles;

  // `adapter_of(i)` is the number of the adapter of row i, and 0 if it has none.
  template <class AdapterOf>
  Rows(size number, const AdapterOf& adapter_of) {
    for (size row = 0; row < number; ++row)
      if (adapter_of(row)) rows.push_back(row);
    std::stable_sort(rows.begin(), rows.end(),
                     [&](size one, size other) { return adapter_of(one) < adapter_of(other); });
    const size end = rows.size();
    for (size first = 0, next; first < end; first = next) {
      const size adapter = adapter_of(rows[first]);
      for (next = first + 1; next < end && next < first + TILE && adapter_of(rows[next]) == adapter;) ++next;
      tiles.push_back({adapter, first, next - first});
    }
  }
};

inline float total(Floats values) {
  float lanes[LANES];
  vector::store(lanes, values);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// One linear layer of one step.
struct Update {
  const Linear& linear;
  const Rows& rows;
  const Stored* x;  // [.., inputs]
  Stored* y;        // [.., outputs]
  float* h;         // [rows with an adapter, most_ranks]: scaling * A x

  // h of RANKS ranks of a part, from `rank` on, whose numbers in h begin at `column`.
  template <int ROWS>
  void shrink(const Rows::Tile& tile, const Part& part, size rank, size column) const {
    const size inputs = linear.inputs, stride = padded(inputs, PADDED_INPUTS);
    const Stored* a = part.a + rank * stride;
    const Stored* from[ROWS];
    for (int r = 0; r < ROWS; ++r) from[r] = x + rows.rows[tile.first + r] * inputs;
    Floats sums[ROWS][RANKS] = {};
    const auto add = [&](size input, const auto& values_of) {
      Floats lanes[RANKS];
      for (int k = 0; k < RANKS; ++k) lanes[k] = vector::wide(a + k * stride + input);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        const Floats values = values_of(from[r] + input);
#pragma GCC unroll 4
        for (int k = 0; k < RANKS; ++k) sums[r][k] = vector::multiply_add(values, lanes[k], sums[r][k]);
      }
    };
    size input = 0;
    for (; input + LANES <= inputs; input += LANES)
      add(input, [](const Stored* at) { return vector::wide(at); });
    if (input < inputs)
      add(input, [&](const Stored* at) { return panels::some(at, inputs - input); });
    for (int r = 0; r < ROWS; ++r)
      for (int k = 0; k < RANKS; ++k)
        h[(tile.first + r) * linear.most_ranks + column + k] = part.scaling * total(sums[r][k]);
  }

  // Adds B h to the outputs of a panel of a part, whose ranks begin at `column` in h.
  template <int ROWS>
  void expand(const Rows::Tile& tile, const Part& part, size panel, size column) const {
    const Stored* b = part.b + panel * part.ranks * PANEL;
    const float* from[ROWS];
    Stored* to[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      from[r] = h + (tile.first + r) * linear.most_ranks + column;
      to[r] = y + rows.rows[tile.first + r] * linear.outputs + part.first;
    }
    const size end = std::min(part.outputs, (panel + 1) * PANEL);
    for (size output = panel * PANEL; output < end; output += OUTPUTS, b += OUTPUTS) {
      Floats sums[ROWS][VECTORS] = {};
      for (size rank = 0; rank < part.ranks; ++rank) {
        Floats lanes[VECTORS];
        for (int v = 0; v < VECTORS; ++v) lanes[v] = vector::wide(b + rank * PANEL + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; ++v)
            sums[r][v] = vector::multiply_add(from[r][rank], lanes[v], sums[r][v]);
      }
      for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) {
          const size at = output + v * LANES, left = end - at;
          if (left > 0) panels::put(to[r] + at, panels::some(to[r] + at, left) + sums[r][v], left);
        }
    }
  }

  // Calls `each` with the part that has item `item` of a tile, the item's number within the part, and the
  // column in h at which the part begins. A part has count(part) items; a tile may have fewer than `item`.
  template <class Count, class Each>
  void of_item(const Rows::Tile& tile, size item, const Count& count, const Each& each) const {
    const Parts& parts = linear.adapters[tile.adapter];
    size column = 0;
    for (size i = 0; i < parts.number; ++i) {
      const Part& part = parts.parts[i];
      if (item < count(part)) return each(part, item, column);
      item -= count(part);
      column += part.padded_ranks();
    }
  }

  void operator()(Member& me) const {
    const auto together = [&](size items) { return std::max<size>(1, items / (8 * me.threads)); };
    const size blocks = linear.most_ranks / RANKS, shrinks = rows.tiles.size() * blocks;
    me.share(shrinks, together(shrinks), [&](size i) {
      const Rows::Tile& tile = rows.tiles[i / blocks];
      const auto count = [](const Part& part) { return part.padded_ranks() / RANKS; };
      of_item(tile, i % blocks, count, [&](const Part& part, size block, size column) {
        const size rank = block * RANKS;
        switch (tile.number) {
          case 1: return shrink<1>(tile, part, rank, column + rank);
          case 2: return shrink<2>(tile, part, rank, column + rank);
          case 3: return shrink<3>(tile, part, rank, column + rank);
          default: return shrink<4>(tile, part, rank, column + rank);
        }
      });
    });
    const size expands = rows.tiles.size() * linear.most_panels;
    me.share(expands, together(expands), [&](size i) {
      const Rows::Tile& tile = rows.tiles[i / linear.most_panels];
      const auto count = [](const Part& part) { return padded(part.outputs, PANEL) / PANEL; };
      of_item(tile, i % linear.most_panels, count, [&](const Part& part, size panel, size column) {
        switch (tile.number) {
          case 1: return expand<1>(tile, part, panel, column);
          case 2: return expand<2>(tile, part, panel, column);
          case 3: return expand<3>(tile, part, panel, column);
          default: return expand<4>(tile, part, panel, column);
        }
      });
    });
  }
};

static_assert(TILE == 4);

}  // namespace lora
