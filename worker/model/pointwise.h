// Operations of a decoder layer between its matrix products, token by token, on a CPU.
//
// Compiled for one type of elements. Everything is computed in fp32 and rounded where torch's own
// operations round. The result of a token depends on that token alone, so its bits are the same in any
// batch.
//
// All members of a team call these functions together, and divide the tokens among themselves.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../native/element.h"
#include "../native/team.h"

// Hidden visibility, because libraries for other types or head dimensions define the same names.
namespace [[gnu::visibility("hidden")]] pointwise {

using size = std::int64_t;
using element::narrow;
using element::Stored;
using element::wide;
using team::Member;

// e^x; 0 or infinity beyond the exponents of fp32; NaN for NaN.
inline float exponential(float x) {
  x *= 1.44269504088896341f;
  const float bounded = x < -150.0f ? -150.0f : x > 129.0f ? 129.0f : x;
  const float whole = std::nearbyint(bounded), part = bounded - whole;
  const float y = element::exp2_of_part(part);
  // Two factors, because 2^whole itself may be out of fp32's range.
  const std::int32_t exponent = std::int32_t(whole == whole ? whole : 0.0f);
  const std::int32_t first = exponent >> 1, second = exponent - first;
  const std::int32_t first_bits = (first + 127) << 23, second_bits = (second + 127) << 23;
  float first_factor, second_factor;
  std::memcpy(&first_factor, &first_bits, sizeof first_factor);
  std::memcpy(&second_factor, &second_bits, sizeof second_factor);
  return y * first_factor * second_factor;
}

constexpr size LANES = 16;

// The sum is made of LANES partial sums, so that its order does not depend on the compiler.
inline float sum_of_squares(const Stored* x, size width) {
  float sums[LANES] = {};
  size i = 0;
  for (; i + LANES <= width; i += LANES)
    for (size lane = 0; lane < LANES; ++lane) {
      const float value = wide(x[i + lane]);
      sums[lane] += value * value;
    }
  for (; i < width; ++i) sums[i % LANES] += wide(x[i]) * wide(x[i]);
  float sum = 0;
  for (float partial : sums) sum += partial;
  return sum;
}

// Tokens that a thread takes at a time.
constexpr size TOGETHER = 4;

struct Norm {
  const Stored* weight;
  float eps, one;  // `one` is added to the weight: 0 or 1

  // y = x / rms(x) * (weight + one), over `width` elements; y may be x.
  void operator()(const Stored* x, Stored* y, size width) const {
    const float factor = 1.0f / std::sqrt(sum_of_squares(x, width) / float(width) + eps);
    for (size i = 0; i < width; ++i) y[i] = narrow(wide(x[i]) * factor * (wide(weight[i]) + one));
  }
};

// hidden += added, [tokens, width].
inline void sum(Member& me, Stored* hidden, const Stored* added, size tokens, size width) {
  me.share(tokens, TOGETHER, [=](size token) {
    Stored* x = hidden + token * width;
    const Stored* more = added + token * width;
    for (size i = 0; i < width; ++i) x[i] = narrow(wide(x[i]) + wide(more[i]));
  });
}

// For each token: hidden += added, unless added is null, then out = norm(hidden). All are
// [tokens, width]; out may be hidden.
inline void sum_and_norm(Member& me, Stored* hidden, const Stored* added, Norm norm, Stored* out,
                         size tokens, size width) {
  me.share(tokens, TOGETHER, [=](size token) {
    Stored* x = hidden + token * width;
    if (added) {
      const Stored* more = added + token * width;
      for (size i = 0; i < width; ++i) x[i] = narrow(wide(x[i]) + wide(more[i]));
    }
    norm(x, out + token * width, width);
  });
}

// hidden *= factor, [tokens, width].
inline void scale(Member& me, Stored* hidden, float factor, size tokens, size width) {
  me.share(tokens, TOGETHER, [=](size token) {
    for (size i = 0; i < width; ++i) {
      Stored& x = hidden[token * width + i];
      x = narrow(wide(x) * factor);
    }
  });
}

// Limits x [tokens, width] to the range from -limit to limit; NaN stays NaN.
inline void clip(Member& me, Stored* x, float limit, size tokens, size width) {
  me.share(tokens, TOGETHER, [=](size token) {
    for (size i = 0; i < width; ++i) {
      Stored& value = x[token * width + i];
      value = narrow(std::min(std::max(wide(value), -limit), limit));
    }
  });
}

// out = norm(x), [tokens, width]; out may be x.
inline void norm(Member& me, const Stored* x, Norm norm, Stored* out, size tokens, size width) {
  me.share(tokens, TOGETHER,
           [=](size token) { norm(x + token * width, out + token * width, width); });
}

// Norms `number` heads of each token in place. Tokens are `stride` elements apart.
inline void norm_heads(Member& me, Stored* heads, size stride, Norm norm, size tokens, size number,
                       size head_dim) {
  me.share(tokens, TOGETHER, [=](size token) {
    for (size head = 0; head < number; ++head) {
      Stored* x = heads + token * stride + head * head_dim;
      norm(x, x, head_dim);
    }
  });
}

// Activations, with the numbers of worker/model/compiled_pointwise.py. SILU is x * sigmoid(x). GELU uses the
// error function. GELU_TANH approximates the error function by tanh, which equals
// x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3)) (arXiv 1606.08415). GPT_OSS is a gate of its own.
enum Activation : int { SILU, GELU_TANH, GELU, GPT_OSS };

template <Activation ACTIVATION>
inline float activated(float x) {
  if (ACTIVATION == GELU) return 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f));
  constexpr float TWICE_ROOT = 1.59576912160573071f;
  const float argument = ACTIVATION == SILU ? x : TWICE_ROOT * (x + 0.044715f * x * x * x);
  return x / (1.0f + exponential(-argument));
}

template <Activation ACTIVATION>
inline float gated(float gate, float up) {
  if (ACTIVATION != GPT_OSS) return wide(narrow(activated<ACTIVATION>(gate))) * up;
  // Written so that NaN stays NaN.
  const float g = gate > 7.0f ? 7.0f : gate, u = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
  return (u + 1.0f) * g / (1.0f + exponential(-1.702f * g));
}

template <Activation ACTIVATION>
inline void gate(Member& me, const Stored* gate_up, Stored* out, size tokens, size width) {
  me.share(tokens, TOGETHER, [=](size token) {
    const Stored* gate = gate_up + token * 2 * width;
    const Stored* up = gate + width;
    Stored* y = out + token * width;
    for (size i = 0; i < width; ++i) y[i] = narrow(gated<ACTIVATION>(wide(gate[i]), wide(up[i])));
  });
}

// out [tokens, width] = activation(gate) * up, or the gate of gpt-oss. gate_up [tokens, 2 * width] has gate before up.
inline void gate(Member& me, Activation activation, const Stored* gate_up, Stored* out, size tokens,
                 size width) {
  if (activation == SILU) gate<SILU>(me, gate_up, out, tokens, width);
  else if (activation == GELU_TANH) gate<GELU_TANH>(me, gate_up, out, tokens, width);
  else if (activation == GELU) gate<GELU>(me, gate_up, out, tokens, width);
  else gate<GPT_OSS>(me, gate_up, out, tokens, width);
}

// Cosines and sines for the first `pairs` pairs of a head's features; rows are `stride` elements apart.
struct Angles {
  const float* cos;
  const float* sin;
  size pairs, stride;
};

// Rotates each pair (i, i + pairs) of every head in place. The angles of token t are in row rows[t], or in
// row t if `rows` is null. Tokens of `heads` are `stride` elements apart, heads `head_dim` elements.
inline void rotate(Member& me, Stored* heads, size stride, const Angles& angles, const size* rows,
                   size tokens, size number, size head_dim) {
  me.share(tokens, TOGETHER, [=](size token) {
    const size row = rows ? rows[token] : token, half = angles.pairs;
    const float* cos = angles.cos + row * angles.stride;
    const float* sin = angles.sin + row * angles.stride;
    for (size head = 0; head < number; ++head) {
      Stored* low = heads + token * stride + head * head_dim;
      Stored* high = low + half;
      for (size i = 0; i < half; ++i) {
        const float a = wide(low[i]), b = wide(high[i]);
        low[i] = narrow(std::fma(a, cos[i], -(b * sin[i])));
        high[i] = narrow(std::fma(b, cos[i], a * sin[i]));
      }
    }
  });
}

}  // namespace pointwise
