/* Vectors of float32, loaded from and stored as float32 or bfloat16. Included by every C source here.

   Functions have a constant `b16`: whether numbers in memory are bfloat16. */
#ifndef VECTORS_H
#define VECTORS_H
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __FMA__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define WIDTH 16
#else
#define WIDTH 8
#endif
#define UNROLLED _Pragma("GCC unroll 8")
#define INLINED static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * WIDTH), aligned(2), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

/* Written out, since a compiler that may fuse does so in some loops and not in others: the last bits would then depend
   on how many rows there are. */
INLINED floats fused(floats a, floats b, floats sum) {
#if defined __AVX512F__
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined __FMA__
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  return sum + a * b;
#endif
}

/* Into the second cache: the nearest would lose what is needed sooner. The address alone counts. */
INLINED void fetch(const void *numbers, long at, const int b16) {
  __builtin_prefetch((const char *)numbers + at * (b16 ? 2 : 4), 0, 2);
}

INLINED float widened(uint16_t value) {
  union { uint32_t bits; float number; } wide = {(uint32_t)value << 16};
  return wide.number;
}

INLINED uint16_t narrowed(float value) { /* to the nearest bfloat16, ties to even, as PyTorch */
  union { float number; uint32_t bits; } wide = {value};
  if (value != value) return 0x7fc0;
  return (uint16_t)((wide.bits + 0x7fff + ((wide.bits >> 16) & 1)) >> 16);
}

INLINED floats all(float value) { return value - (floats){0}; }

INLINED floats either(words mask, floats yes, floats no) { return (floats)((mask & (words)yes) | (~mask & (words)no)); }

#if WIDTH == 16
#define LANES ((words){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#else
#define LANES ((words){0, 1, 2, 3, 4, 5, 6, 7})
#endif

INLINED floats permuted(floats x, words order) {
#ifdef __clang__
  floats y;
  for (int lane = 0; lane < WIDTH; lane++) y[lane] = x[order[lane]];
  return y;
#else
  return __builtin_shuffle(x, order);
#endif
}

INLINED floats larger(floats a, floats b) { return either((words)(a > b), a, b); }

INLINED floats load(const void *numbers, long at, const int b16) {
  if (!b16) return *(const floats *)((const float *)numbers + at);
  const uint16_t *from = (const uint16_t *)numbers + at;
#if defined __AVX512F__ /* written out, since GCC 12 takes six instructions for it */
  return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)), 16);
#elif defined __AVX2__
  return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from)), 16);
#else
  return (floats)(__builtin_convertvector(*(const halves *)from, words) << 16);
#endif
}

INLINED void store(void *numbers, long at, floats value, const int b16) {
  if (!b16) {
    *(floats *)((float *)numbers + at) = value;
    return;
  }
  words bits = (words)value, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, ok = (words)(value == value);
  *(halves *)((uint16_t *)numbers + at) = __builtin_convertvector((ok & rounded) | (~ok & 0x7fc0), halves);
}

INLINED float sum_of(floats partial) {
  float sum = 0;
  for (int lane = 0; lane < WIDTH; lane++) sum += partial[lane];
  return sum;
}

/* e^x within 2 ulp; 0 below -87, e^88 above 88. x = n log 2 + r, and 2^n is added to the exponent of a polynomial's
   value at r (Taylor's coefficients; |r| <= log(2) / 2 leaves an error of 1e-8 after the seventh). */
INLINED floats exponential(floats x) {
  const float most = 88.0f, least = -87.0f, magic = 12582912.0f; /* 1.5 * 2^23: a sum with it has no fraction */
  words is_zero = (words)(x < least);
  x = either((words)(x > most), all(most), x);
  floats shifted = fused(x, all(1.44269504f), all(magic)), n = shifted - magic;
  floats r = fused(n, all(-0.693359375f), x);
  r = fused(n, all(2.12194440e-4f), r);
  floats value = all(1.0f / 5040);
  value = fused(value, r, all(1.0f / 720));
  value = fused(value, r, all(1.0f / 120));
  value = fused(value, r, all(1.0f / 24));
  value = fused(value, r, all(1.0f / 6));
  value = fused(value, r, all(0.5f));
  value = fused(value, r, all(1.0f));
  value = fused(value, r, all(1.0f));
  words scaled = (words)value + ((words)shifted << 23);
  return either(is_zero, all(0), either((words)(x == x), (floats)scaled, x));
}
#endif
