// A decoder in two calls: from tokens to hidden states, and from hidden states to logits. In each call one
// team of threads computes the operations in order, and divides each operation among its members. The
// results have the same bits as those of worker/model/decoder.py, which calls the same functions layer
// by layer.
//
// Each rank of a tensor-parallel worker computes its share. Sums over the ranks are made by a callback.
//
// Compiled for one head dimension, one type of weights and one type of all other elements.

#include "../attention/paged.h"
#include "lora.h"
#include "mixture.h"
#include "panels.h"
#include "pointwise.h"

namespace [[gnu::visibility("hidden")]] stack {

using size = std::int64_t;
using panels::Linear;
using pointwise::Angles;
using pointwise::Norm;
using element::Stored;
using team::Member;

// Embedding rows of the tokens from `start` to before `stop` out of `vocab`, in panels or row-major. Other
// tokens, which other ranks hold, have rows of zeros.
struct Embedding {
  const panels::Weight* weight;
  const float* scales;
  size in_panels, vocab, start, stop;
  float multiplier;

  void operator()(Member& me, const size* tokens, Stored* out, size number, size width) const {
    me.share(number, pointwise::TOGETHER, [=](size i) { row(tokens[i], out + i * width, width); });
  }

  void row(size token, Stored* to, size width) const {
    if (token < start || token >= stop) std::memset(to, 0, width * sizeof *to);
    else if (in_panels) panels::row(weight, scales, token - start, width, to);
    else
      for (size i = 0; i < width; ++i)
        to[i] = element::narrow(element::wide(weight[(token - start) * width + i]));
  }
};

// Structures that Python passes; worker/model/stack.py defines the same ones. A norm whose weight is null
// is absent.

struct Layer {
  Norm before_attention, query, key, after_attention;
  Linear qkv, out;
  paged::Form form;
  size angles;  // index in Stack.angles
  Norm before_mlp, after_mlp;
  Linear gate_up, down;             // not read if the layer has a mixture of experts
  const mixture::Mixture* mixture;  // or null
  // LoRA adapters of the linear layers; not read if no token has one.
  const lora::Linear *qkv_adapters, *out_adapters, *gate_up_adapters, *down_adapters;
};

// Replaces `number` elements by their sums over the ranks.
using SumOverRanks = void (*)(Stored* elements, size number);

struct Stack {
  Embedding embedding;
  const Angles* angles;  // tables with one row for each of `positions` positions
  size positions;
  const Layer* layers;
  size num_layers, width, heads, kv_heads, activation;
  size norms_all;  // whether the norms of queries and keys are over all heads together
  float residual_multiplier;
  float clip;  // largest magnitude of queries, keys and values; 0: none
  Norm norm;
  Linear head;
  SumOverRanks sum_over_ranks;  // null if there is only one rank
};

// Tokens of a step, their positions in their sequences, and the indices of those whose hidden states are
// requested (sites, ascending).
struct Tokens {
  const size* ids;
  const size* positions;
  size number;
  const size* sites;  // not read if num_sites is number or 0
  size num_sites;
  const size* adapters;  // numbers of the tokens' LoRA adapters, 0: none; null if no token has one
  float* low_rank;       // work space of the adapters: [number, most_ranks of the linear layers]
};

// Buffers [tokens][..] for the intermediate results of a layer, and memory for those of a mixture.
struct Space {
  Stored *normed, *qkv, *attended, *added, *gate_up, *gated;
  char* mixture;
};

struct Pass {
  Member& me;
  const Stack& stack;
  const paged::Cache& cache;
  const paged::Step& step;
  const Tokens& tokens;
  const lora::Rows &adapted, &adapted_sites;  // tokens with an adapter, and sites with one
  Stored* hidden;  // [tokens, width]; finally the first num_sites rows are those of the sites
  const Space& space;

  void operator()() const {
    size number = tokens.number;
    const lora::Rows* rows = &adapted;
    stack.embedding(me, tokens.ids, hidden, number, stack.width);
    sum_over_ranks(hidden, number);
    if (stack.embedding.multiplier != 1.0f)
      pointwise::scale(me, hidden, stack.embedding.multiplier, number, stack.width);
    for (size i = 0; i < stack.num_layers; ++i) {
      const Layer& layer = stack.layers[i];
      pointwise::sum_and_norm(me, hidden, i ? space.added : nullptr, layer.before_attention,
                              space.normed, number, stack.width);
      attend(layer, i);
      // With several ranks every sum covers all tokens, whichever hidden states are requested.
      if (i + 1 == stack.num_layers && !stack.sum_over_ranks && tokens.num_sites != tokens.number) {
        number = leave_sites();
        rows = &adapted_sites;
      }
      layer.out(me, space.attended, space.added, number);
      adapt(layer.out_adapters, *rows, space.attended, space.added);
      finish_added(layer.after_attention, number);
      pointwise::sum_and_norm(me, hidden, space.added, layer.before_mlp, space.normed, number,
                              stack.width);
      transform(layer, number, *rows);
      finish_added(layer.after_mlp, number);
    }
    pointwise::sum(me, hidden, space.added, number, stack.width);
    if (stack.sum_over_ranks) leave_sites();
  }

  void attend(const Layer& layer, size index) const {
    const size number = tokens.number;
    const size stride = layer.qkv.outputs, turned = stack.heads + stack.kv_heads;
    Stored* query = space.qkv;
    Stored* key = query + stack.heads * HEAD_DIM;
    Stored* value = query + turned * HEAD_DIM;
    layer.qkv(me, space.normed, space.qkv, number);
    adapt(layer.qkv_adapters, adapted, space.normed, space.qkv);
    norm_heads(layer.query, query, stride, stack.heads);
    norm_heads(layer.key, key, stride, stack.kv_heads);
    if (stack.clip != 0.0f) pointwise::clip(me, space.qkv, stack.clip, number, stride);
    pointwise::rotate(me, query, stride, stack.angles[layer.angles], tokens.positions, number,
                      turned, HEAD_DIM);
    paged::write(me, cache, step, index, heads(key, stride), heads(value, stride));
    paged::attend(me, cache, step, index, heads(query, stride),
                  space.attended, stack.heads, layer.form);
  }

  void norm_heads(const Norm& norm, Stored* first, size stride, size heads) const {
    if (!norm.weight) return;
    const size together = stack.norms_all ? heads : 1;
    pointwise::norm_heads(me, first, stride, norm, tokens.number, heads / together,
                          together * HEAD_DIM);
  }

  // MLP or mixture of experts.
  void transform(const Layer& layer, size number, const lora::Rows& rows) const {
    if (layer.mixture) {
      const mixture::Space inner(*layer.mixture, number, space.mixture);
      mixture::Pass{me, *layer.mixture, inner, space.normed, space.added, number}();
      return;
    }
    layer.gate_up(me, space.normed, space.gate_up, number);
    adapt(layer.gate_up_adapters, rows, space.normed, space.gate_up);
    pointwise::gate(me, pointwise::Activation(stack.activation), space.gate_up, space.gated, number,
                    layer.down.inputs);
    layer.down(me, space.gated, space.added, number);
    adapt(layer.down_adapters, rows, space.gated, space.added);
  }

  // Adds the products of the rows' LoRA adapters to y.
  void adapt(const lora::Linear* linear, const lora::Rows& rows, const Stored* x, Stored* y) const {
    if (!rows.tiles.empty()) lora::Update{*linear, rows, x, y, tokens.low_rank}(me);
  }

  // Moves the rows of the sites to the front, and returns the number of sites. The rows of other tokens are
  // no longer needed.
  size leave_sites() const {
    if (tokens.num_sites == tokens.number) return tokens.number;
    const size attended = stack.heads * HEAD_DIM;
    me.once([&] {
      for (size i = 0; i < tokens.num_sites; ++i) {
        move(hidden, tokens.sites[i], i, stack.width);
        move(space.attended, tokens.sites[i], i, attended);
      }
    });
    return tokens.num_sites;
  }

  static void move(Stored* rows, size from, size to, size width) {
    std::memmove(rows + to * width, rows + from * width, width * sizeof(Stored));
  }

  static paged::Heads<const Stored> heads(const Stored* first, size stride) {
    return {first, stride};
  }

  void finish_added(const Norm& norm, size number) const {
    sum_over_ranks(space.added, number);
    if (norm.weight) pointwise::norm(me, space.added, norm, space.added, number, stack.width);
    if (stack.residual_multiplier != 1.0f)
      pointwise::scale(me, space.added, stack.residual_multiplier, number, stack.width);
  }

  void sum_over_ranks(Stored* rows, size number) const {
    if (stack.sum_over_ranks) me.once([&] { stack.sum_over_ranks(rows, number * stack.width); });
  }
};

inline bool all_below(const size* values, size number, size end) {
  return std::all_of(values, values + number, [=](size value) { return value >= 0 && value < end; });
}

}  // namespace stack

#pragma GCC visibility push(default)
extern "C" {

// Computes the hidden states of `tokens`. hidden is [tokens, width]; the results for the sites are its first
// num_sites rows. Returns 1, or 0 without computing anything if a token or a position is out of range.
int hidden_states(const stack::Stack* stack, const paged::Cache* cache, const paged::Step* step,
                  const stack::Tokens* tokens, element::Stored* hidden, const stack::Space* space,
                  int threads) {
  if (!stack::all_below(tokens->ids, tokens->number, stack->embedding.vocab) ||
      !stack::all_below(tokens->positions, tokens->number, stack->positions))
    return 0;
  const bool has_adapters = tokens->adapters, has_sites = tokens->num_sites != tokens->number;
  const lora::Rows adapted(has_adapters ? tokens->number : 0,
                           [=](std::int64_t token) { return tokens->adapters[token]; });
  const lora::Rows adapted_sites(has_adapters && has_sites ? tokens->num_sites : 0, [=](std::int64_t site) {
    return tokens->adapters[tokens->sites[site]];
  });
  team::gather(threads, [&](team::Member& me) {
    stack::Pass{me, *stack, *cache, *step, *tokens, adapted, adapted_sites, hidden, *space}();
  });
  return 1;
}

// Computes logits [number, outputs of the head] of hidden [number, width]. normed is scratch memory of the
// shape of hidden.
void logits(const stack::Stack* stack, const element::Stored* hidden, element::Stored* normed,
            float* logits, std::int64_t number, int threads) {
  team::gather(threads, [&](team::Member& me) {
    pointwise::norm(me, hidden, stack->norm, normed, number, stack->width);
    stack->head(me, normed, logits, number);
  });
}

}  // extern "C"
