// LoRA adapters of a linear layer (lora.h) in a call of its own, for layers that run one by one.

#include "lora.h"

#pragma GCC visibility push(default)
extern "C" {

// Adds to y [number, outputs] the products of x [number, inputs] with the matrices of each row's adapter, whose
// numbers are `adapters`. h has room for number * most_ranks elements.
void update(const lora::Linear* linear, const std::int64_t* adapters, std::int64_t number,
            const element::Stored* x, element::Stored* y, float* h, int threads) {
  const lora::Rows rows(number, [=](std::int64_t row) { return adapters[row]; });
  team::gather(threads, [&](team::Member& me) { lora::Update{*linear, rows, x, y, h}(me); });
}

}  // extern "C"
