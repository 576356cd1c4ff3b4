/* y = x W^T + b for 1 to 8 rows of x, reading W once: see streamed.py, which compiles this file.

   A sum of products is a vector of partial sums, taken from the first input to the last. So every row's sum is taken in
   the same order, whatever rows are beside it. */
#include "functions.h"
#include "vectors.h"

#define MOST_ROWS 8
#define PIECE(rows) (rows > 4 ? 64 : 128) /* inputs: 2 KiB of x, which stay in the nearest cache */
#define GROUP 8 /* outputs that share a piece of x meanwhile */
#define CHUNK 32 /* outputs that a thread takes at once */
#define SMALL (1 << 15) /* weights below which other threads are not worth waking */

/* One of the two vectors that 2 WIDTH weights are. A word is two bfloat16s: shifted it is the first as a float, masked
   the second; so bfloat16's vectors are the even and the odd weights, as x lies for them. */
INLINED floats weights(const void *weight, long at, const int half, const int b16) {
  if (!b16) return *(const floats *)((const float *)weight + at + half * WIDTH);
  words pairs = *(const words *)((const uint16_t *)weight + at);
  return half ? (floats)(pairs & 0xffff0000u) : (floats)(pairs << 16);
}

/* A compiler short of registers reads x again for every output. In bfloat16, with twice the arithmetic for a byte, that
   is what takes the time. */
INLINED floats in_register(floats x) {
#ifdef __FMA__
  __asm__("" : "+x"(x));
#endif
  return x;
}

/* A few outputs by all rows, over so many inputs, added to their totals. Weights of the next group are fetched meanwhile:
   a core alone keeps too few reads under way for all of memory's bandwidth. */
INLINED void tile(const void *weight, long at, const float *x, floats *totals, long inputs, long in, const int rows,
                  const int outputs, const int b16) {
  floats sum[4][MOST_ROWS];
  UNROLLED for (int o = 0; o < outputs; o++) UNROLLED for (int r = 0; r < rows; r++) sum[o][r] = totals[o * rows + r];
  for (long i = 0; i < inputs; i += 2 * WIDTH)
    if (b16)
      UNROLLED for (int half = 0; half < 2; half++) {
        const floats *rows_at = (const floats *)(x + (i + half * WIDTH) * rows);
        floats w[4];
        UNROLLED for (int o = 0; o < outputs; o++) {
          w[o] = in_register(weights(weight, at + o * in + i, half, b16));
          if (!half) fetch(weight, at + (o + GROUP) * in + i, b16);
        }
        UNROLLED for (int r = 0; r < rows; r++) {
          floats of_row = outputs > 1 ? in_register(rows_at[r]) : rows_at[r];
          UNROLLED for (int o = 0; o < outputs; o++) sum[o][r] = fused(w[o], of_row, sum[o][r]);
        }
      }
    else
      UNROLLED for (int o = 0; o < outputs; o++)
        UNROLLED for (int half = 0; half < 2; half++) {
          floats w = weights(weight, at + o * in + i, half, b16);
          /* With AVX2 both halves are of one line of the cache. */
          if (!(half && WIDTH == 8)) fetch(weight, at + (o + GROUP) * in + i + half * WIDTH, b16);
          const floats *rows_at = (const floats *)(x + (i + half * WIDTH) * rows);
          UNROLLED for (int r = 0; r < rows; r++) sum[o][r] = fused(w, rows_at[r], sum[o][r]);
        }
  UNROLLED for (int o = 0; o < outputs; o++) UNROLLED for (int r = 0; r < rows; r++) totals[o * rows + r] = sum[o][r];
}

/* The totals of so many outputs, some at a time, for all rows. */
INLINED void group_of(const void *weight, long at, const float *x, floats *totals, long in, const int rows,
                      const int outputs, const int number, const int b16) {
  long i = 0;
  for (; i + PIECE(rows) <= in; i += PIECE(rows))
    for (int o = 0; o < number; o += outputs)
      tile(weight, at + o * in + i, x + i * rows, totals + o * rows, PIECE(rows), in, rows, outputs, b16);
  if (i < in)
    for (int o = 0; o < number; o += outputs)
      tile(weight, at + o * in + i, x + i * rows, totals + o * rows, in - i, in, rows, outputs, b16);
}

/* Outputs first..last. x lies as tiles read it: WIDTH inputs of the first row, of the second, ... */
INLINED void chunk(const void *weight, const float *x, const void *bias, void *y, long first, long last, long in,
                   long out, const int rows, const int outputs, const int b16) {
  floats totals[CHUNK * MOST_ROWS];
  memset(totals, 0, sizeof(floats) * CHUNK * rows);
  long o = first;
  for (; o + GROUP <= last; o += GROUP)
    group_of(weight, o * in, x, totals + (o - first) * rows, in, rows, outputs, GROUP, b16);
  for (; o < last; o++) group_of(weight, o * in, x, totals + (o - first) * rows, in, rows, 1, 1, b16);
  for (o = first; o < last; o++)
    for (int r = 0; r < rows; r++) {
      float sum = sum_of(totals[(o - first) * rows + r]);
      if (b16)
        ((uint16_t *)y)[r * out + o] = narrowed(sum + (bias ? widened(((const uint16_t *)bias)[o]) : 0));
      else
        ((float *)y)[r * out + o] = sum + (bias ? ((const float *)bias)[o] : 0);
    }
}

typedef void (*Chunk)(const void *, const float *, const void *, void *, long, long, long, long);
#define CHUNK_OF_ROWS(rows, outputs, b16)                                                                              \
  static void chunk_##rows##_##b16(const void *weight, const float *x, const void *bias, void *y, long first,          \
                                   long last, long in, long out) {                                                     \
    chunk(weight, x, bias, y, first, last, in, out, rows, outputs, b16);                                               \
  }
#define CHUNKS(b16)                                                                                                    \
  CHUNK_OF_ROWS(1, 4, b16)                                                                                             \
  CHUNK_OF_ROWS(2, 4, b16)                                                                                             \
  CHUNK_OF_ROWS(3, b16 ? 2 : 4, b16)                                                                                   \
  CHUNK_OF_ROWS(4, b16 ? 2 : 4, b16)                                                                                   \
  CHUNK_OF_ROWS(5, 2, b16)                                                                                             \
  CHUNK_OF_ROWS(6, 2, b16)                                                                                             \
  CHUNK_OF_ROWS(7, 1, b16)                                                                                             \
  CHUNK_OF_ROWS(8, 1, b16)                                                                                             \
  static const Chunk chunks_##b16[] = {chunk_1_##b16, chunk_2_##b16, chunk_3_##b16, chunk_4_##b16,                     \
                                       chunk_5_##b16, chunk_6_##b16, chunk_7_##b16, chunk_8_##b16};
CHUNKS(0)
CHUNKS(1)

static void all_outputs(Chunk of_rows, const void *weight, const float *x, const void *bias, void *y, long out, long in,
                        int threads) {
  _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1 && out * in >= SMALL)")
  for (long first = 0; first < out; first += CHUNK)
    of_rows(weight, x, bias, y, first, first + CHUNK < out ? first + CHUNK : out, in, out);
}

/* weight [out, in], x [rows, in], bias [out] or NULL, y [rows, out]; in is a multiple of 32, rows are 1 to 8. */
void streamed_f32(const float *weight, const float *x, const float *bias, float *y, long out, long in, long rows,
                  int threads) {
  float laid[rows * in] __attribute__((aligned(64)));
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < in; i += WIDTH) memcpy(laid + i * rows + r * WIDTH, x + r * in + i, 4 * WIDTH);
  all_outputs(chunks_0[rows - 1], weight, laid, bias, y, out, in, threads);
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
  all_outputs(chunks_1[rows - 1], weight, laid, bias, y, out, in, threads);
}
