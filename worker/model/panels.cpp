// Packing of weights into panels (panels.h), products with them, and mixtures of experts (mixture.h).

#include "mixture.h"
#include "panels.h"

#include <memory>

using namespace panels;

#pragma GCC visibility push(default)
extern "C" {

// Outputs per panel.
size width() { return WIDTH; }

// Packs weight [outputs, packs] into panels, in its own memory. outputs must be a multiple of WIDTH.
void pack(std::uint32_t* weight, size outputs, size packs, int threads) {
  using Pack = std::uint32_t;
#pragma omp parallel num_threads(threads)
  {
    const std::unique_ptr<Pack[]> rows(new Pack[WIDTH * packs]);
#pragma omp for
    for (size output = 0; output < outputs; output += WIDTH) {
      Pack* panel = weight + output * packs;
      std::memcpy(rows.get(), panel, WIDTH * packs * sizeof(Pack));
      for (size i = 0; i < packs; ++i)
        for (size o = 0; o < WIDTH; ++o) panel[i * WIDTH + o] = rows[o * packs + i];
    }
  }
}

// y = x @ weight.T + bias
void multiply(const Linear* linear, const Stored* x, Stored* y, size rows, int threads) {
  const Product<Stored> product = linear->product(x, y, rows);
  team::gather(threads, [&](team::Member& me) { panels::multiply(me, product); });
}

// y = x @ weight.T + bias as fp32.
void multiply_to_fp32(const Linear* linear, const Stored* x, float* y, size rows, int threads) {
  const Product<float> product = linear->product(x, y, rows);
  team::gather(threads, [&](team::Member& me) { panels::multiply(me, product); });
}

// Writes the rows `ids` [number] of the weight to out [number, inputs].
void look_up(const Weight* panels, const float* scales, const size* ids, Stored* out, size number,
             size inputs, int threads) {
  team::gather(threads, [&](team::Member& me) {
    me.share(number, 1, [&](size i) { row(panels, scales, ids[i], inputs, out + i * inputs); });
  });
}

// Bytes of work space that `mix` needs for `tokens` tokens.
size mixture_bytes(const mixture::Mixture* mixture, size tokens) {
  return mixture::Space(*mixture, tokens, nullptr).bytes;
}

// Computes out [tokens, width] of x [tokens, width]. `memory` has mixture_bytes(mixture, tokens) bytes.
void mix(const mixture::Mixture* mixture, const Stored* x, Stored* out, size tokens, char* memory,
         int threads) {
  const mixture::Space space(*mixture, tokens, memory);
  team::gather(threads, [&](team::Member& me) {
    mixture::Pass{me, *mixture, space, x, out, tokens}();
  });
}

}  // extern "C"
