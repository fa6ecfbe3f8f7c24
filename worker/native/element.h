// Element types in memory, and their conversion to fp32 (wide) and from fp32 (narrow).

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// Hidden visibility, because libraries for other types define the same names.
namespace [[gnu::visibility("hidden")]] element {

struct Bfloat16 {
  std::uint16_t bits;
};

inline float wide(float from) { return from; }
inline float wide(std::int8_t from) { return from; }
inline float wide(Bfloat16 from) {
  const std::uint32_t bits = std::uint32_t(from.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void narrow(float from, float& to) { to = from; }
// Rounds to nearest, ties to even, as torch does; NaN for NaN.
inline void narrow(float from, Bfloat16& to) {
  std::uint32_t bits;
  std::memcpy(&bits, &from, sizeof bits);
  const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  to.bits = std::uint16_t(from != from ? bits >> 16 | 0x40 : rounded);
}

// GCC supports _Float16 in C++ from version 12 on x86, and from version 13 on aarch64.
#if defined(__aarch64__)
#define HAS_HALF
using Half = __fp16;
#elif defined(__FLT16_MAX__)
#define HAS_HALF
using Half = _Float16;
#endif

#ifdef HAS_HALF
inline float wide(Half from) { return from; }
inline void narrow(float from, Half& to) { to = Half(from); }
#endif

// The element type that the library is compiled for.
#if defined(BFLOAT16)
using Stored = Bfloat16;
#elif defined(FLOAT16)
using Stored = Half;
#else
using Stored = float;
#endif

inline Stored narrow(float from) {
  Stored to;
  narrow(from, to);
  return to;
}

// 2^part for -1/2 <= part <= 1/2, of a number or a vector. The polynomial is that of Cephes' exp2f.
template <class Floats>
inline Floats exp2_of_part(Floats part) {
  Floats y = part * 1.535336188319500e-4f + 1.339887440266574e-3f;
  y = y * part + 9.618437357674640e-3f;
  y = y * part + 5.550332471162809e-2f;
  y = y * part + 2.402264791363012e-1f;
  y = y * part + 6.931472028550421e-1f;
  return y * part + 1.0f;
}

}  // namespace element
