// All layers of a decoder in one call, by one team of threads: between two operations they wait for
// each other, and hardly ever so long that one falls asleep. It is what worker/model/decoder.py computes layer by layer with
// the same functions, bit for bit.
//
// Compiled for bfloat16 and one head dimension.

#include "../attention/paged.h"
#include "panels.h"
#include "pointwise.h"

namespace [[gnu::visibility("hidden")]] stack {

using size = std::int64_t;
using panels::bf16;
using pointwise::Angles;
using pointwise::Norm;
using pointwise::Stored;

struct Linear {
  const bf16* panels;
  const bf16* bias;  // or null
  size outputs, inputs;

  void operator()(const Stored* x, Stored* y, size tokens) const {
    panels::multiply({reinterpret_cast<const bf16*>(x), panels, bias, reinterpret_cast<bf16*>(y),
                      tokens, outputs, inputs});
  }
};

// What Python hands over; worker/model/stack.py has the same structures. A norm without a weight is
// none.

struct Layer {
  Norm before_attention, query, key, after_attention;
  Linear qkv, out;
  paged::Form form;
  size angles;  // which ones
  Norm before_mlp, after_mlp;
  Linear gate_up, down;
};

struct Stack {
  const Layer* layers;
  size num_layers, width, heads, kv_heads, intermediate, activation;
};

// Memory for [tokens] of what stands between the operations.
struct Space {
  Stored *normed, *qkv, *attended, *added, *gate_up, *gated;
};

struct Pass {
  const Stack& stack;
  const paged::Cache& cache;
  const paged::Step& step;
  const Angles* angles;
  Stored* hidden;
  size tokens;
  const Space& space;

  void operator()() const {
    for (size i = 0; i < stack.num_layers; ++i) {
      const Layer& layer = stack.layers[i];
      pointwise::sum_and_norm(hidden, i ? space.added : nullptr, layer.before_attention,
                              space.normed, tokens, stack.width);
      attend(layer, i);
      norm_added(layer.after_attention);
      pointwise::sum_and_norm(hidden, space.added, layer.before_mlp, space.normed, tokens,
                              stack.width);
      layer.gate_up(space.normed, space.gate_up, tokens);
      pointwise::gate(pointwise::Activation(stack.activation), space.gate_up, space.gated, tokens,
                      stack.intermediate);
      layer.down(space.gated, space.added, tokens);
      norm_added(layer.after_mlp);
    }
    pointwise::sum(hidden, space.added, tokens, stack.width);
  }

  void attend(const Layer& layer, size index) const {
    const size stride = layer.qkv.outputs, turned = stack.heads + stack.kv_heads;
    Stored* query = space.qkv;
    Stored* key = query + stack.heads * HEAD_DIM;
    Stored* value = query + turned * HEAD_DIM;
    layer.qkv(space.normed, space.qkv, tokens);
    if (layer.query.weight)
      pointwise::norm_heads(query, stride, layer.query, tokens, stack.heads, HEAD_DIM);
    if (layer.key.weight)
      pointwise::norm_heads(key, stride, layer.key, tokens, stack.kv_heads, HEAD_DIM);
    pointwise::rotate(query, stride, angles[layer.angles], tokens, turned, HEAD_DIM);
    paged::write(cache, step, index, heads(key, stride), heads(value, stride));
    paged::attend(cache, step, index, heads(query, stride),
                  reinterpret_cast<paged::Stored*>(space.attended), stack.heads, layer.form);
    layer.out(space.attended, space.added, tokens);
  }

  static paged::Heads<const paged::Stored> heads(const Stored* first, size stride) {
    return {reinterpret_cast<const paged::Stored*>(first), stride};
  }

  void norm_added(const Norm& norm) const {
    if (norm.weight)
      pointwise::sum_and_norm(space.added, nullptr, norm, space.added, tokens, stack.width);
  }
};

}  // namespace stack

#pragma GCC visibility push(default)
extern "C" {

// hidden [tokens, width] goes through all layers, in its place.
void forward(const stack::Stack* layers, const paged::Cache* cache, const paged::Step* step,
             const pointwise::Angles* angles, pointwise::Stored* hidden, std::int64_t tokens,
             const stack::Space* space, int threads) {
  const stack::Pass pass{*layers, *cache, *step, angles, hidden, tokens, *space};
#pragma omp parallel num_threads(threads)
  pass();
}

}  // extern "C"
