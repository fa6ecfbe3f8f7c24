// FMA peak of the cores: products and sums in registers only.

#include <cstdint>

#include "../worker/native/vector.h"

#pragma GCC visibility push(default)
extern "C" {

// Returns whether pairs of bfloat16 are multiplied, as in worker/model/panels.h on CPUs that support it.
int has_pairs() {
#if defined(WITH_PAIRS) && defined(PAIRS)
  return 1;
#else
  return 0;
#endif
}

// Runs `rounds` in each thread; returns the operations of all threads, where an FMA counts as two.
double work(std::int64_t rounds, int threads) {
  using vector::Floats;
  constexpr int CHAINS = 12;
  double operations = 0;
#pragma omp parallel num_threads(threads) reduction(+ : operations)
  {
    Floats sums[CHAINS];
    // The values differ, or the compiler would merge the chains.
    for (int i = 0; i < CHAINS; ++i) sums[i] = vector::spread(float(i));
    Floats one = vector::spread(0.999f), other = vector::spread(0.001f);
    for (std::int64_t round = 0; round < rounds; ++round) {
      asm volatile("" : "+x"(one), "+x"(other));  // or the compiler takes the loop away
#pragma GCC unroll 12
      for (int i = 0; i < CHAINS; ++i) {
#if defined(WITH_PAIRS) && defined(PAIRS)
        sums[i] = vector::dot(0x3f7e3f7e, (vector::Pairs)other, sums[i]);
#else
        sums[i] = vector::multiply_add(one, other, sums[i]);
#endif
      }
    }
    float total = 0;
    for (const Floats& sum : sums) total += sum[0];
    operations += 2.0 * (has_pairs() + 1) * CHAINS * vector::LANES * rounds + (total == 12345.0f);
  }
  return operations;
}

}  // extern "C"
