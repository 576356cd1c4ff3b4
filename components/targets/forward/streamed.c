/* y = x W^T + b for 1 to 8 rows of x, reading W once: see streamed.py, which compiles this file.

   A tile is a few outputs by all rows. Its sums stay in registers, a vector of partial sums each, while it runs along a
   block of inputs. Every row's sum is taken in the same order, whatever rows are beside it. */
#include "vectors.h"

#define MOST_ROWS 8
#define BLOCK 4096 /* inputs whose 8 rows of x, 128 KiB, stay in a core's cache; shorter blocks stream W less well */
#define CHUNK 32  /* outputs that a thread takes at once */
#define SMALL (1 << 15) /* weights below which other threads are not worth waking */

INLINED void store_f32(float *y, float value) { *y = value; }
INLINED void store_b16(uint16_t *y, float value) { *y = narrowed(value); }
INLINED float load_f32(const float *bias) { return *bias; }
INLINED float load_b16(const uint16_t *bias) { return widened(*bias); }

/* The next tile is fetched while this one is computed: a core alone keeps too few reads under way for all of memory's
   bandwidth, and with eight rows it has no time to look ahead. */
INLINED void tile_f32(const float *weight, const float *x, floats *sums, long inputs, long in, const int rows,
                      const int outputs) {
  floats sum[8][MOST_ROWS];
  UNROLLED for (int o = 0; o < outputs; o++) UNROLLED for (int r = 0; r < rows; r++) sum[o][r] = sums[o * rows + r];
  for (long i = 0; i < inputs; i += WIDTH) {
    UNROLLED for (int o = 0; o < outputs; o++) {
      floats w = *(const floats *)(weight + o * in + i);
      __builtin_prefetch(weight + (o + outputs) * in + i);
      const floats *at = (const floats *)(x + i * rows);
      UNROLLED for (int r = 0; r < rows; r++) sum[o][r] = fused(w, at[r], sum[o][r]);
    }
  }
  UNROLLED for (int o = 0; o < outputs; o++) UNROLLED for (int r = 0; r < rows; r++) sums[o * rows + r] = sum[o][r];
}

/* A word is two bfloat16s: shifted it is the first as a float, masked the second. */
INLINED void tile_b16(const uint16_t *weight, const float *x, floats *sums, long inputs, long in, const int rows,
                      const int outputs) {
  floats sum[8][MOST_ROWS];
  UNROLLED for (int o = 0; o < outputs; o++) UNROLLED for (int r = 0; r < rows; r++) sum[o][r] = sums[o * rows + r];
  for (long i = 0; i < inputs; i += 2 * WIDTH) {
    UNROLLED for (int o = 0; o < outputs; o++) {
      words pairs = *(const words *)(weight + o * in + i);
      __builtin_prefetch(weight + (o + outputs) * in + i);
      floats first = (floats)(pairs << 16), second = (floats)(pairs & 0xffff0000u);
      const floats *at = (const floats *)(x + i * rows);
      UNROLLED for (int r = 0; r < rows; r++) sum[o][r] = fused(first, at[r], sum[o][r]);
      UNROLLED for (int r = 0; r < rows; r++) sum[o][r] = fused(second, at[rows + r], sum[o][r]);
    }
  }
  UNROLLED for (int o = 0; o < outputs; o++) UNROLLED for (int r = 0; r < rows; r++) sums[o * rows + r] = sum[o][r];
}

/* Outputs first..last of so many rows. x lies as tiles read it: WIDTH inputs of the first row, of the second, ... */
#define CHUNK_OF_ROWS(NAME, NUMBER, rows, outputs)                                                                     \
  static void chunk_##NAME##_##rows(const NUMBER *weight, const float *x, const NUMBER *bias, NUMBER *y, long first,   \
                                    long last, long in, long out) {                                                    \
    floats sums[CHUNK * rows];                                                                                         \
    memset(sums, 0, sizeof sums);                                                                                      \
    for (long i = 0; i < in; i += BLOCK) {                                                                             \
      long inputs = in - i < BLOCK ? in - i : BLOCK, o = first;                                                        \
      for (; o + outputs <= last; o += outputs)                                                                        \
        tile_##NAME(weight + o * in + i, x + i * rows, sums + (o - first) * rows, inputs, in, rows, outputs);          \
      for (; o < last; o++)                                                                                            \
        tile_##NAME(weight + o * in + i, x + i * rows, sums + (o - first) * rows, inputs, in, rows, 1);                \
    }                                                                                                                  \
    for (long o = first; o < last; o++)                                                                                \
      for (int r = 0; r < rows; r++)                                                                                   \
        store_##NAME(y + r * out + o, sum_of(sums[(o - first) * rows + r]) + (bias ? load_##NAME(bias + o) : 0));      \
  }

#define KERNELS(NAME, NUMBER)                                                                                          \
  CHUNK_OF_ROWS(NAME, NUMBER, 1, 8)                                                                                    \
  CHUNK_OF_ROWS(NAME, NUMBER, 2, 4)                                                                                    \
  CHUNK_OF_ROWS(NAME, NUMBER, 3, 4)                                                                                    \
  CHUNK_OF_ROWS(NAME, NUMBER, 4, 4)                                                                                    \
  CHUNK_OF_ROWS(NAME, NUMBER, 5, 2)                                                                                    \
  CHUNK_OF_ROWS(NAME, NUMBER, 6, 2)                                                                                    \
  CHUNK_OF_ROWS(NAME, NUMBER, 7, 2)                                                                                    \
  CHUNK_OF_ROWS(NAME, NUMBER, 8, 2)                                                                                    \
  static void (*const NAME##_of_rows[])(const NUMBER *, const float *, const NUMBER *, NUMBER *, long, long, long,     \
                                        long) = {chunk_##NAME##_1, chunk_##NAME##_2, chunk_##NAME##_3,                 \
                                                 chunk_##NAME##_4, chunk_##NAME##_5, chunk_##NAME##_6,                 \
                                                 chunk_##NAME##_7, chunk_##NAME##_8};                                  \
  static void all_##NAME(const NUMBER *weight, const float *x, const NUMBER *bias, NUMBER *y, long out, long in,       \
                         long rows, int threads) {                                                                     \
    _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1 && out * in >= SMALL)")            \
    for (long first = 0; first < out; first += CHUNK)                                                                  \
      NAME##_of_rows[rows - 1](weight, x, bias, y, first, first + CHUNK < out ? first + CHUNK : out, in, out);         \
  }

KERNELS(f32, float)
KERNELS(b16, uint16_t)

/* weight [out, in], x [rows, in], bias [out] or NULL, y [rows, out]; in is a multiple of 32, rows are 1 to 8. */
void streamed_f32(const float *weight, const float *x, const float *bias, float *y, long out, long in, long rows,
                  int threads) {
  float laid[rows * in] __attribute__((aligned(64)));
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < in; i += WIDTH) memcpy(laid + i * rows + r * WIDTH, x + r * in + i, 4 * WIDTH);
  all_f32(weight, laid, bias, y, out, in, rows, threads);
}

void streamed_b16(const uint16_t *weight, const uint16_t *x, const uint16_t *bias, uint16_t *y, long out, long in,
                  long rows, int threads) {
  float laid[rows * in] __attribute__((aligned(64)));
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < in; i += 2 * WIDTH)
      for (int lane = 0; lane < WIDTH; lane++) {
        laid[i * rows + r * WIDTH + lane] = widened(x[r * in + i + 2 * lane]);
        laid[(i + WIDTH) * rows + r * WIDTH + lane] = widened(x[r * in + i + 2 * lane + 1]);
      }
  all_b16(weight, laid, bias, y, out, in, rows, threads);
}
