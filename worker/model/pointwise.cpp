// The functions of pointwise.h with a C interface; each call gathers a team of threads.

#include "pointwise.h"

using element::Stored;
using pointwise::size;
using team::gather;
using team::Member;

#pragma GCC visibility push(default)
extern "C" {

void sum_and_norm(Stored* hidden, const Stored* added, const Stored* weight, Stored* out, size tokens,
                  size width, float eps, float one, int threads) {
  gather(threads, [&](Member& me) {
    pointwise::sum_and_norm(me, hidden, added, {weight, eps, one}, out, tokens, width);
  });
}

void gate(int activation, const Stored* gate_up, Stored* out, size tokens, size width, int threads) {
  gather(threads, [&](Member& me) {
    pointwise::gate(me, pointwise::Activation(activation), gate_up, out, tokens, width);
  });
}

void rotate(Stored* heads, size stride, const float* cos, const float* sin, size tokens, size number,
            size head_dim, size dim, int threads) {
  // The second half of a row of sin has the sines, and the first half their negatives
  // (worker/model/rope.py).
  const pointwise::Angles angles{cos, sin + dim / 2, dim / 2, dim};
  gather(threads, [&](Member& me) {
    pointwise::rotate(me, heads, stride, angles, nullptr, tokens, number, head_dim);
  });
}

}  // extern "C"
