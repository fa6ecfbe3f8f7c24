// Vectors of fp32 as wide as the CPU's registers, in the vector extensions of GCC and Clang.
//
// Intrinsics are used only if the extensions cannot express an operation, or if a compiler may choose between
// different roundings.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

#include "element.h"

// Hidden visibility, because libraries for other types define the same names.
namespace [[gnu::visibility("hidden")]] vector {

// Number of floats in a vector register, and number of registers. GCC keeps wider vectors in memory.
#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8;
constexpr int REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4;
constexpr int REGISTERS = 32;
#else
constexpr int LANES = 4;
constexpr int REGISTERS = 16;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef std::int32_t Ints __attribute__((vector_size(4 * LANES)));

template <class Vector>
inline Vector loaded(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class Vector>
inline void store(void* to, Vector vector) {
  std::memcpy(to, &vector, sizeof vector);
}

// A vector with `value` in all lanes. For a value in memory this is one load. The expression `zeros + value`
// would need an addition, which the compiler may not omit, because -0 + 0 is +0.
inline Floats spread(float value) {
#if defined(__AVX512F__)
  return (Floats)_mm512_set1_ps(value);
#elif defined(__AVX__)
  return (Floats)_mm256_set1_ps(value);
#else
  return Floats{value, value, value, value};
#endif
}

// a * b + c, rounded once. The fused operation is requested explicitly, because GCC, when it tunes for AMD Zen,
// fuses the expression only in some loops. A result's bits would then depend on the other rows of its batch.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline Floats multiply_add(float a, Floats b, Floats c) { return multiply_add(spread(a), b, c); }

// Pairs has two bfloat16 elements per lane. In each lane, dot(one, other, sum) is
// sum + one.first * other.first + one.second * other.second. PAIRS is defined if the CPU has this operation.
#if defined(__AVX512BF16__)
#define PAIRS
using Pairs = __m512bh;

inline Floats dot(std::uint32_t one, Pairs other, Floats sum) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (Pairs)_mm512_set1_epi32(static_cast<int>(one)), other);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PAIRS
using Pairs = bfloat16x8_t;

inline Floats dot(std::uint32_t one, Pairs other, Floats sum) {
  return (Floats)vbfdotq_f32((float32x4_t)sum, other, vreinterpretq_bf16_u32(vdupq_n_u32(one)));
}
#endif

// LANES elements, converted to fp32.
inline Floats wide(const float* from) { return loaded<Floats>(from); }

inline Floats wide(const element::Bfloat16* from) {
  typedef std::uint16_t Halves __attribute__((vector_size(2 * LANES)));
  return (Floats)(__builtin_convertvector(loaded<Halves>(from), Ints) << 16);
}

#ifdef HAS_HALF
inline Floats wide(const element::Half* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(loaded<__m256i>(from));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(loaded<__m128i>(from));
#else
  Floats lanes;
  for (int i = 0; i < LANES; ++i) lanes[i] = element::wide(from[i]);
  return lanes;
#endif
}
#endif

}  // namespace vector
