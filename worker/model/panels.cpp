// Weights brought into panels, and products with them (panels.h).

#include "panels.h"

#include <memory>

using namespace panels;

#pragma GCC visibility push(default)
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
  const Product<bf16> product{x, panels, bias, y, rows, outputs, inputs};
  team::gather(threads, [&](team::Member& me) { panels::multiply(me, product); });
}

// The same without a bias, as fp32.
void multiply_to_fp32(const bf16* x, const bf16* panels, float* y, size rows, size outputs,
                      size inputs, int threads) {
  const Product<float> product{x, panels, nullptr, y, rows, outputs, inputs};
  team::gather(threads, [&](team::Member& me) { panels::multiply(me, product); });
}

}  // extern "C"
