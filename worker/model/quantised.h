// Quantised weights in panels: their codes, which are decoded in registers, and their scales.
//
// A code has 8 or 4 bits. A 32-bit word has the codes of CODES consecutive inputs of one output. Even inputs
// are in its lower half and odd ones in its upper half, so that a shift and an operation on 16-bit lanes
// decode the weights of two neighbouring inputs, which some CPUs multiply in pairs.
//
// The inputs are divided into groups. Each group begins with a new word. The sum of a group's products is
// multiplied by the scale of the output and the group. A code counts from the group's zero point, if any.
//
// Compiled for one type of codes: QUANTISED_INT8, QUANTISED_INT4 (both two's complement), QUANTISED_E4M3 or
// QUANTISED_E2M1 (floats).

#pragma once

#include <cstdint>
#include <cstring>

#include "../native/element.h"
#include "../native/vector.h"

// Hidden visibility, because libraries for other types define the same names.
namespace [[gnu::visibility("hidden")]] quantised {

using element::Stored;
using vector::Floats;
using vector::Ints;
using vector::LANES;
using size = std::int64_t;
using Word = std::uint32_t;

#if defined(QUANTISED_INT4) || defined(QUANTISED_E2M1)
constexpr int BITS = 4;
#else
constexpr int BITS = 8;
#endif
// Codes per word.
constexpr int CODES = 32 / BITS;

// DOUBLED is defined if codes are decoded to twice the weights. UNIT is the value of 1 in decoded weights.
#if defined(QUANTISED_E2M1) && defined(__AVX2__) && !defined(__AVX512F__)
#define DOUBLED
constexpr float UNIT = 0.5f;
#else
constexpr float UNIT = 1.0f;
#endif

// Groups of a weight. All arrays are padded to whole panels of outputs.
struct Groups {
  size number;          // 0: the weight is not quantised
  size inputs;          // of all groups; further inputs are padding, which is not multiplied
  size first, length;   // inputs in the first group, and in each other but the last
  size words;           // per output
  const void* scales;   // [number, columns]
  size scale_type;      // 0: fp32, 1: bfloat16, 2: fp16
  size columns;
  const std::int32_t* column;  // column of each output in `scales`; null: the output's number
  const std::uint8_t* zeros;   // [number, zero_bytes], with two 4-bit zero points per byte; or null
  size zero_bytes;

  size count(size group, size inputs_done) const {
    const size most = group ? length : first, left = inputs - inputs_done;
    return most < left ? most : left;
  }

  // Scales of the LANES outputs from `output` on, for sums in units of UNIT.
  Floats scale(size group, size output) const { return UNIT * stored_scale(group, output); }

  Floats stored_scale(size group, size output) const {
    switch (scale_type) {
      case 1: return scale_from<element::Bfloat16>(group, output);
#ifdef HAS_HALF
      case 2: return scale_from<element::Half>(group, output);
#endif
      default: return scale_from<float>(group, output);
    }
  }

  template <class Scale>
  Floats scale_from(size group, size output) const {
    const Scale* row = static_cast<const Scale*>(scales) + group * columns;
    if (!column) return vector::wide(row + output);
    Floats lanes;
    for (int i = 0; i < LANES; ++i) lanes[i] = element::wide(row[column[output + i]]);
    return lanes;
  }

  // Zero points of the LANES outputs from `output` on.
  Floats zero(size group, size output) const {
    std::uint64_t codes = 0;
    std::memcpy(&codes, zeros + group * zero_bytes + output / 2, LANES / 2);
    Ints lanes;
    for (int i = 0; i < LANES; ++i) lanes[i] = std::int32_t(codes >> 4 * i << 28) >> 28;
    return __builtin_convertvector(lanes, Floats);
  }
};

// Sum of x [number]. Lane by lane, and then over the lanes.
inline float sum(const Stored* x, size number) {
  Floats lanes{};
  size i = 0;
  for (; i + LANES <= number; i += LANES) lanes += vector::wide(x + i);
  for (size lane = 0; i < number; ++i, ++lane) lanes[lane] += element::wide(x[i]);
  float sums[LANES];
  vector::store(sums, lanes);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  return sums[0];
}

#if defined(__AVX512BF16__) && defined(BFLOAT16)

// Table of the 16 values of a 4-bit code as bfloat16, twice, because an index has 5 bits.
struct Table {
  alignas(64) std::uint16_t values[32] = {};

  constexpr Table() {
#if defined(QUANTISED_E2M1)
    constexpr std::uint16_t VALUES[8] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
    for (int i = 0; i < 32; ++i) values[i] = std::uint16_t(VALUES[i % 8] | (i % 16 < 8 ? 0 : 0x8000));
#else
    for (int i = 0; i < 32; ++i) values[i] = bits(i % 16 < 8 ? i % 16 : i % 16 - 16);
#endif
  }

  // Bits of a small integer as bfloat16.
  static constexpr std::uint16_t bits(int value) {
    if (value == 0) return 0;
    int magnitude = value < 0 ? -value : value, exponent = 127 + 7;
    for (; magnitude < 128; magnitude *= 2) --exponent;
    return std::uint16_t((value < 0 ? 0x8000 : 0) | exponent << 7 | (magnitude & 127));
  }
};

// Weights of the inputs 2 * pair and 2 * pair + 1.
inline vector::Pairs decoded(__m512i words, int pair) {
#if defined(QUANTISED_INT4) || defined(QUANTISED_E2M1)
  static constexpr Table TABLE;
  const __m512i index = _mm512_srli_epi32(words, BITS * pair);
  return (vector::Pairs)_mm512_permutexvar_epi16(index, _mm512_load_si512(TABLE.values));
#elif defined(QUANTISED_INT8)
  // An 8-bit integer as fp32 is 0 in its lower half, and its upper half is the same number as bfloat16.
  const __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(words, 24 - BITS * pair), 24);
  const __m512i odd = _mm512_srai_epi32(pair ? words : _mm512_slli_epi32(words, BITS), 24);
  const __m512i lower = _mm512_srli_epi32((__m512i)_mm512_cvtepi32_ps(even), 16);
  return (vector::Pairs)_mm512_or_si512(lower, (__m512i)_mm512_cvtepi32_ps(odd));
#else
  // The exponent's bias is 7, that of bfloat16 is 127. Codes with exponent 0 are multiples of 2^-9.
  alignas(64) static constexpr std::uint16_t SMALL[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const __m512i shifted = pair ? _mm512_srli_epi16(words, 4) : _mm512_slli_epi16(words, 4);
  const __m512i normal =
      _mm512_add_epi16(_mm512_and_si512(shifted, _mm512_set1_epi16(0x07f0)), _mm512_set1_epi16(120 << 7));
  const __mmask32 small = _mm512_testn_epi16_mask(words, _mm512_set1_epi16(pair ? 0x7800 : 0x0078));
  const __m512i index = pair ? _mm512_srli_epi16(words, 8) : words;
  const __m512i magnitude =
      _mm512_mask_permutexvar_epi16(normal, small, index, _mm512_load_si512(SMALL));
  const __m512i sign = pair ? words : _mm512_slli_epi16(words, 8);
  // (sign & 0x8000) | magnitude
  return (vector::Pairs)_mm512_ternarylogic_epi32(sign, _mm512_set1_epi16(short(0x8000)), magnitude, 0xea);
#endif
}

// sums += x times the words of CODES inputs, for panels of WIDE vectors that are `panel` words apart.
template <int WIDE, int ROWS, int VECTORS>
inline void add(Floats (&sums)[ROWS][VECTORS], const Stored* x, size stride, const Word* words, size panel) {
  __m512i lanes[VECTORS];
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; ++v)
    lanes[v] = vector::loaded<__m512i>(words + v / WIDE * panel + v % WIDE * LANES);
#pragma GCC unroll 4
  for (int pair = 0; pair < CODES / 2; ++pair) {
    vector::Pairs weights[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) weights[v] = decoded(lanes[v], pair);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      std::uint32_t two;
      std::memcpy(&two, x + r * stride + 2 * pair, sizeof two);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = vector::dot(two, weights[v], sums[r][v]);
    }
  }
}

#else

// First bit of the code of one of a word's inputs.
constexpr int bit_of(int input) { return input % 2 * 16 + input / 2 * BITS; }

#ifdef DOUBLED

// Words of LANES outputs, as twice the weights in 8-bit integers: those whose codes are in the lower halves of the
// words' bytes, and those in the upper halves.
struct Words {
  Ints lower, upper;

  static Words loaded(const Word* from) {
    const Ints words = vector::loaded<Ints>(from);
    return {doubled(words), doubled(words >> 4)};
  }

  static Ints doubled(Ints words) {
    const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    return (Ints)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)(words & 0x0f0f0f0f));
  }

  // Weights of an input, in units of UNIT.
  Floats weights(int input) const {
    const int bit = bit_of(input);
    return __builtin_convertvector((bit % 8 ? upper : lower) << (24 - bit / 8 * 8) >> 24, Floats);
  }
};

#else

// Words of LANES outputs.
struct Words {
  Ints words;

  static Words loaded(const Word* from) { return {vector::loaded<Ints>(from)}; }

  // Weights of an input, in units of UNIT.
  Floats weights(int input) const {
    const int bit = bit_of(input);
#if defined(QUANTISED_INT4) && defined(__AVX512F__)
    const __m512 table = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
    return (Floats)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)words, bit), table);
#elif defined(QUANTISED_E2M1) && defined(__AVX512F__)
    const __m512 table = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return (Floats)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)words, bit), table);
#elif defined(QUANTISED_E2M1)
    // The exponent's bias is 1, that of fp32 is 127. Codes with exponent 0 are multiples of 2^-1.
    const Ints code = words >> bit, magnitude = code & 7;
    const Ints normal = (magnitude << 22) + (126 << 23);
    const Ints small = (Ints)(__builtin_convertvector(magnitude, Floats) * 0.5f);
    return (Floats)((magnitude < 2 ? small : normal) | ((code << 28) & INT32_MIN));
#elif defined(QUANTISED_E4M3)
    // The exponent's bias is 7, that of fp32 is 127; codes with exponent 0 become subnormal. The shift to the right
    // copies the sign into bits of the exponent, which the mask clears.
    return (Floats)(words << (24 - bit) >> 4 & std::int32_t(0x87f00000)) * 0x1p120f;
#else
    return __builtin_convertvector(words << (32 - BITS - bit) >> (32 - BITS), Floats);
#endif
  }
};

#endif

// sums += x times the words of CODES inputs, for panels of WIDE vectors that are `panel` words apart.
template <int WIDE, int ROWS, int VECTORS>
inline void add(Floats (&sums)[ROWS][VECTORS], const Stored* x, size stride, const Word* words, size panel) {
  Words lanes[VECTORS];
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; ++v)
    lanes[v] = Words::loaded(words + v / WIDE * panel + v % WIDE * LANES);
#pragma GCC unroll 8
  for (int input = 0; input < CODES; ++input) {
    Floats weights[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) weights[v] = lanes[v].weights(input);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const Floats factor = vector::spread(element::wide(x[r * stride + input]));
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v)
        sums[r][v] = vector::multiply_add(factor, weights[v], sums[r][v]);
    }
  }
}

// to [CODES] = the weights in the words of CODES inputs, of one panel, in units of UNIT.
template <int VECTORS>
inline void decode(const Word* words, Floats (*to)[VECTORS]) {
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; ++v) {
    const Words lanes = Words::loaded(words + v * LANES);
#pragma GCC unroll 8
    for (int input = 0; input < CODES; ++input) to[input][v] = lanes.weights(input);
  }
}

// Defined if a batch decodes weights once, a block at a time. The pairs above are decoded for each tile of rows.
#define DECODES

#endif

}  // namespace quantised
