// Mixture of experts on a CPU: the router's choices, and the products of each expert with just the rows of
// the tokens that chose it (grouped products).
//
// The pairs of a token and one of its experts are sorted by expert, and the tokens' rows are copied in this
// order. The panels of all experts are then the iterations of one loop, so that all threads have work both
// for one token with several experts and for many tokens. No rows are padded, and an expert that no token
// chose is not read.
//
// A token's results are added up in fp32 in the order of the experts' numbers, the shared expert's last. The
// result of a token depends on that token alone, so its bits are the same in any batch.
//
// All members of a team call these functions together.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "panels.h"
#include "pointwise.h"

// Hidden visibility, because libraries for other types or head dimensions define the same names.
namespace [[gnu::visibility("hidden")]] mixture {

using element::narrow;
using element::Stored;
using element::wide;
using panels::Linear;
using panels::Product;
using size = std::int64_t;
using team::Member;

struct Expert {
  Linear gate_up, down;
};

// Structure that Python passes; worker/model/compiled_mixture.py defines the same one.
struct Mixture {
  Linear router;          // a logit of each expert, and the gate of the shared expert if there is one
  const Expert* experts;  // by number, followed by the shared one
  size number, top_k, normalised, activation;

  size width() const { return router.inputs; }
  bool has_shared() const { return router.outputs > number; }
  size num_experts() const { return router.outputs; }  // with the shared one
};

// Products with several matrices, computed in one loop over all their panels.
template <class Out>
struct Products {
  // Tasks of all products. Atomic and never 0, because a thread that is late may read it while another one
  // already prepares the products of the next layer. That thread skips this loop, but must not omit it.
  std::atomic<size>* tasks;
  size* number;
  Product<Out>* products;
  size* first_tasks;  // of each product

  void add(const Stored* x, const Linear& linear, Out* y, size rows) const {
    const size i = (*number)++;
    products[i] = linear.product(x, y, rows);
    first_tasks[i] = i ? first_tasks[i - 1] + products[i - 1].tasks() : 0;
  }

  // Must be called after the last `add`.
  void finish() const {
    const size last = *number - 1;
    tasks->store(first_tasks[last] + products[last].tasks(), std::memory_order_relaxed);
  }

  void multiply(Member& me) const {
    const size total = tasks->load(std::memory_order_relaxed);
    me.share(total, 1, [&](size task) {
      const size mine = of(task), next = std::min(task + me.threads, total - 1), other = of(next);
      products[mine].compute(task - first_tasks[mine], products[other].panel(next - first_tasks[other]));
    });
  }

  // The product that has `task`.
  size of(size task) const {
    return std::upper_bound(first_tasks, first_tasks + *number, task) - first_tasks - 1;
  }
};

// Buffers for `tokens` tokens. `memory` may be null to find out the number of bytes only.
struct Space {
  size bytes = 0;
  Products<Stored> gate_ups;
  Products<float> downs;
  Stored* logits;         // [tokens, outputs of the router]
  float* probabilities;   // [tokens, experts]
  float* weights;         // [tokens, top_k + 1]: of each chosen expert, and of the shared one
  size* chosen;           // [tokens, top_k], ascending
  size* rows;             // [tokens, top_k]: the pair's row among those of all experts
  size* tokens_of_rows;   // [rows]
  size* ends;             // [experts]
  Stored* gathered;       // [rows, width]
  Stored* gate_up;        // [rows, 2 * intermediate size], then the same of the shared expert
  Stored* gated;
  float* results;         // [rows, width], then [tokens, width] of the shared expert

  Space(const Mixture& m, size tokens, char* memory) {
    const size pairs = tokens * m.top_k, inner = m.experts[0].down.inputs;
    const size shared = m.has_shared() ? m.experts[m.number].down.inputs : 0;
    const auto take = [&](auto*& field, size number) {
      using Field = std::remove_reference_t<decltype(*field)>;
      field = reinterpret_cast<Field*>(memory + bytes);
      bytes += (number * size(sizeof(Field)) + panels::LINE - 1) / panels::LINE * panels::LINE;
    };
    // First, so that they are in the same place for all mixtures that use the same memory.
    take(gate_ups.tasks, 1);
    take(downs.tasks, 1);
    take(gate_ups.number, 1);
    take(gate_ups.products, m.num_experts());
    take(gate_ups.first_tasks, m.num_experts());
    take(downs.number, 1);
    take(downs.products, m.num_experts());
    take(downs.first_tasks, m.num_experts());
    take(logits, tokens * m.router.outputs);
    take(probabilities, tokens * m.number);
    take(weights, tokens * (m.top_k + 1));
    take(chosen, pairs);
    take(rows, pairs);
    take(tokens_of_rows, pairs);
    take(ends, m.number);
    take(gathered, pairs * m.width());
    take(gate_up, 2 * (pairs * inner + tokens * shared));
    take(gated, pairs * inner + tokens * shared);
    take(results, (pairs + (m.has_shared() ? tokens : 0)) * m.width());
  }
};

// Computes out [tokens, width] of x [tokens, width].
struct Pass {
  Member& me;
  const Mixture& m;
  const Space& space;
  const Stored* x;
  Stored* out;
  size tokens;

  void operator()() const {
    if (tokens == 0) return;
    const size pairs = tokens * m.top_k, width = m.width();
    const size inner = m.experts[0].down.inputs;
    m.router(me, x, space.logits, tokens);
    me.share(tokens, pointwise::TOGETHER, [&](size token) { choose(token); });
    me.once([&] { sort(); });
    me.share(pairs, pointwise::TOGETHER, [&](size row) {
      std::memcpy(space.gathered + row * width, x + space.tokens_of_rows[row] * width,
                  width * sizeof(Stored));
    });
    space.gate_ups.multiply(me);
    const auto activation = pointwise::Activation(m.activation);
    pointwise::gate(me, activation, space.gate_up, space.gated, pairs, inner);
    if (m.has_shared())
      pointwise::gate(me, activation, space.gate_up + 2 * pairs * inner, space.gated + pairs * inner,
                      tokens, m.experts[m.number].down.inputs);
    space.downs.multiply(me);
    me.share(tokens, pointwise::TOGETHER, [&](size token) { add_up(token); });
  }

  // Chooses the token's experts, and computes the weights of their results. Of equally probable experts, the
  // first ones are chosen.
  void choose(size token) const {
    const Stored* logits = space.logits + token * m.router.outputs;
    float* p = space.probabilities + token * m.number;
    float* weights = space.weights + token * (m.top_k + 1);
    size* chosen = space.chosen + token * m.top_k;
    softmax(logits, p, m.number);
    float sum = 0;
    for (size slot = 0; slot < m.top_k; ++slot) {
      size best = -1;
      for (size expert = 0; expert < m.number; ++expert)
        if (p[expert] != TAKEN && (best < 0 || p[expert] > p[best])) best = expert;
      sum += p[best];
      size place = slot;
      for (; place > 0 && chosen[place - 1] > best; --place) {
        chosen[place] = chosen[place - 1];
        weights[place] = weights[place - 1];
      }
      chosen[place] = best;
      weights[place] = p[best];
      p[best] = TAKEN;
    }
    if (m.normalised)
      for (size slot = 0; slot < m.top_k; ++slot) weights[slot] /= sum;
    if (m.has_shared())
      weights[m.top_k] = 1.0f / (1.0f + pointwise::exponential(-wide(logits[m.number])));
  }

  // Number in place of the probability of an expert that is chosen already.
  static constexpr float TAKEN = -1.0f;

  static void softmax(const Stored* logits, float* p, size number) {
    float largest = wide(logits[0]), sum = 0;
    for (size i = 1; i < number; ++i) largest = std::max(largest, wide(logits[i]));
    for (size i = 0; i < number; ++i) sum += p[i] = pointwise::exponential(wide(logits[i]) - largest);
    for (size i = 0; i < number; ++i) p[i] /= sum;
  }

  // Sorts the pairs by expert, and prepares the products.
  void sort() const {
    const size pairs = tokens * m.top_k, width = m.width();
    size* next = space.ends;  // the next free row of each expert
    std::fill(next, next + m.number, size(0));
    for (size pair = 0; pair < pairs; ++pair) ++next[space.chosen[pair]];
    size begin = 0;
    for (size expert = 0; expert < m.number; ++expert) {
      const size rows = next[expert];
      next[expert] = begin;
      begin += rows;
    }
    for (size pair = 0; pair < pairs; ++pair) {
      const size row = next[space.chosen[pair]]++;
      space.rows[pair] = row;
      space.tokens_of_rows[row] = pair / m.top_k;
    }
    *space.gate_ups.number = *space.downs.number = 0;
    begin = 0;
    for (size expert = 0; expert < m.number; begin = next[expert++])
      if (next[expert] > begin)
        add(m.experts[expert], space.gathered + begin * width, begin * m.experts[0].down.inputs, begin,
            next[expert] - begin);
    if (m.has_shared()) add(m.experts[m.number], x, pairs * m.experts[0].down.inputs, pairs, tokens);
    space.gate_ups.finish();
    space.downs.finish();
  }

  // Prepares the products of an expert whose features begin at `feature` in Space.gated, and whose results
  // begin at row `result`.
  void add(const Expert& expert, const Stored* from, size feature, size result, size rows) const {
    space.gate_ups.add(from, expert.gate_up, space.gate_up + 2 * feature, rows);
    space.downs.add(space.gated + feature, expert.down, space.results + result * m.width(), rows);
  }

  void add_up(size token) const {
    const size width = m.width();
    const float* weights = space.weights + token * (m.top_k + 1);
    const size* rows = space.rows + token * m.top_k;
    float* sum = space.results + rows[0] * width;
    for (size i = 0; i < width; ++i) sum[i] *= weights[0];
    for (size slot = 1; slot < m.top_k; ++slot)
      add_weighted(sum, space.results + rows[slot] * width, weights[slot]);
    if (m.has_shared())
      add_weighted(sum, space.results + (tokens * m.top_k + token) * width, weights[m.top_k]);
    for (size i = 0; i < width; ++i) out[token * width + i] = narrow(sum[i]);
  }

  void add_weighted(float* sum, const float* result, float weight) const {
    for (size i = 0; i < m.width(); ++i) sum[i] += weight * result[i];
  }
};

}  // namespace mixture
