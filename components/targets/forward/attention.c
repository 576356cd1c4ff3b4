/* Attention of few rows over a cache of keys and values: see attention.py.

   Columns are taken in chunks that begin at multiples of CHUNK, whatever column is the first to be seen. A chunk gives
   each row its largest score, the sum of exponentials and the sum of values; chunks are merged in their order. So a
   row has the same bits whatever rows are beside it and however many threads there are. */
#include "functions.h"
#include "vectors.h"

#define CHUNK 256 /* columns of a task; attention.py has the same number, and MOST_SIZE */
#define ROWS 16   /* rows of queries that a task takes at once: their scores, 16 KiB, stay in the nearest cache */
#define COLUMNS 32 /* columns whose values are widened at once */
#define MOST_SIZE 256
#define FEW (1 << 15) /* numbers of keys below which other threads are not worth waking */

/* Lane j of the result is the sum of the lanes of vector j, for WIDTH vectors; it changes them. */
INLINED floats sums_of(floats *of) {
  UNROLLED for (int apart = WIDTH / 2; apart; apart /= 2)
    UNROLLED for (int j = 0; j < apart; j++) {
      /* of[j] and of[j + apart] become one vector: lanes whose bit `apart` is 0 are of the first, others of the second */
      words own = (LANES & (uint32_t)apart) == 0, other = LANES ^ (uint32_t)apart;
      floats a = of[j], b = of[j + apart];
      of[j] = either(own, a, permuted(b, other)) + either(own, permuted(a, other), b);
    }
  return of[0];
}

/* Lines one after the other: by turns with those of another place, half of the gain is lost. */
INLINED void fetch_all(const void *numbers, long at, long count, const int b16) {
  for (long i = 0; i < count; i += b16 ? 32 : 16) fetch(numbers, at + i, b16); /* a line of 64 bytes */
}

/* Scores of `rows` queries (float32, scaled) with columns first..last of one chunk, of which the first is lane 0. The
   next keys and these columns' values are fetched meanwhile. */
INLINED void score(const float *queries, const void *keys, const void *values, float *scores, long begin, long first,
                   long last, long rows, long size, const int b16) {
  float wide[WIDTH * MOST_SIZE] __attribute__((aligned(64)));
  for (long at = begin + (first - begin) / WIDTH * WIDTH; at < last; at += WIDTH) {
    const float *of[WIDTH];
    UNROLLED for (int j = 0; j < WIDTH; j++) {
      long column = at + j < first ? first : at + j < last ? at + j : last - 1; /* those outside are hidden below */
      if (b16) {
        for (long i = 0; i < size; i += WIDTH) store(wide, j * size + i, load(keys, (column - first) * size + i, 1), 0);
        of[j] = wide + j * size;
      } else {
        of[j] = (const float *)keys + (column - first) * size;
      }
    }
    words outside = (words)((LANES + (uint32_t)(at - begin) < (uint32_t)(first - begin)) |
                            (LANES + (uint32_t)(at - begin) >= (uint32_t)(last - begin)));
    fetch_all(keys, (at + 2 * WIDTH - first) * size, WIDTH * size, b16);
    fetch_all(values, (at - first) * size, WIDTH * size, b16);
    for (long r = 0; r < rows; r++) {
      floats sums[WIDTH];
      UNROLLED for (int j = 0; j < WIDTH; j++) sums[j] = all(0);
      for (long i = 0; i < size; i += WIDTH) {
        floats query = load(queries, r * size + i, 0);
        UNROLLED for (int j = 0; j < WIDTH; j++) sums[j] = fused(query, load(of[j], i, 0), sums[j]);
      }
      store(scores, r * CHUNK + at - begin, either(outside, all(-INFINITY), sums_of(sums)), 0);
    }
  }
}

/* Add to sums [rows, size] of float32 the values of columns first..last, each times its row's share. */
INLINED void mix(const float *shares, const void *values, float *sums, long begin, long first, long last, long rows,
                 long size, const int b16, const int vectors) {
  float wide[COLUMNS * MOST_SIZE] __attribute__((aligned(64)));
  for (long from = first; from < last; from += COLUMNS) {
    const long columns = last - from < COLUMNS ? last - from : COLUMNS;
    const float *of = (const float *)values + (from - first) * size;
    if (b16) {
      for (long i = 0; i < columns * size; i += WIDTH) store(wide, i, load(values, (from - first) * size + i, 1), 0);
      of = wide;
    }
    for (long r = 0; r < rows; r++)
      for (long d = 0; d < size; d += vectors * WIDTH) {
        floats sum[8];
        UNROLLED for (int v = 0; v < vectors; v++) sum[v] = load(sums, r * size + d + v * WIDTH, 0);
        for (long c = 0; c < columns; c++) {
          floats share = all(shares[r * CHUNK + from - begin + c]);
          UNROLLED for (int v = 0; v < vectors; v++)
            sum[v] = fused(share, load(of, c * size + d + v * WIDTH, 0), sum[v]);
        }
        UNROLLED for (int v = 0; v < vectors; v++) store(sums, r * size + d + v * WIDTH, sum[v], 0);
      }
  }
}

/* What one chunk gives to the rows of the heads that share its keys: parts [rows, size + 2]. */
INLINED void chunk_of(const void *queries, const void *keys, const void *values, const void *mask, float *parts, long b,
                      long group, long begin, const Sight *of, const int b16) {
  const long size = of->size, together = of->heads / of->kv_heads, number = together * of->rows;
  const long first = of->first > begin ? of->first : begin, last = of->stop < begin + CHUNK ? of->stop : begin + CHUNK;
  const long at = b * of->key_batch + group * of->key_head + (first - of->first) * size;
  const void *key = b16 ? (const void *)((const uint16_t *)keys + at) : (const float *)keys + at;
  const void *value = b16 ? (const void *)((const uint16_t *)values + at) : (const float *)values + at;
  float query[ROWS * MOST_SIZE] __attribute__((aligned(64))), scores[ROWS * CHUNK] __attribute__((aligned(64)));
  for (long from = 0; from < number; from += ROWS) {
    const long rows = number - from < ROWS ? number - from : ROWS;
    for (long r = 0; r < rows; r++) {
      const long head = group * together + (from + r) / of->rows, t = (from + r) % of->rows;
      const long place = b * of->query_batch + t * of->query_row + head * size;
      for (long i = 0; i < size; i += WIDTH) store(query, r * size + i, load(queries, place + i, b16) * of->scale, 0);
    }
    score(query, key, value, scores, begin, first, last, rows, size, b16);
    const long low = (first - begin) / WIDTH * WIDTH, high = last - begin;
    for (long r = 0; r < rows; r++) {
      float *row = scores + r * CHUNK, *part = parts + (from + r) * (size + 2);
      if (mask) {
        const long place = b * of->mask_batch + (from + r) % of->rows * of->mask_row - of->first;
        for (long c = first; c < last; c++)
          row[c - begin] += b16 ? widened(((const uint16_t *)mask)[place + c]) : ((const float *)mask)[place + c];
      }
      floats most = all(-INFINITY), sum = {0};
      for (long c = low; c < high; c += WIDTH) most = larger(load(row, c, 0), most);
      float largest = most[0];
      for (int lane = 1; lane < WIDTH; lane++) largest = most[lane] > largest ? most[lane] : largest;
      for (long c = low; c < high; c += WIDTH) {
        floats share = largest == -INFINITY ? all(0) : exponential(load(row, c, 0) - largest);
        sum = sum + share;
        store(row, c, share, 0);
      }
      part[size] = largest;
      part[size + 1] = sum_of(sum);
    }
    float sums[ROWS * MOST_SIZE] __attribute__((aligned(64)));
    memset(sums, 0, rows * size * sizeof(float));
    if (size % (8 * WIDTH) == 0)
      mix(scores, value, sums, begin, first, last, rows, size, b16, 8);
    else if (size % (4 * WIDTH) == 0)
      mix(scores, value, sums, begin, first, last, rows, size, b16, 4);
    else
      mix(scores, value, sums, begin, first, last, rows, size, b16, 1);
    for (long r = 0; r < rows; r++) memcpy(parts + (from + r) * (size + 2), sums + r * size, size * sizeof(float));
  }
}

/* The row of `size` numbers that its chunks' parts, `apart` floats from each other, come to. sink: NULL, or a score
   without a value. */
INLINED void merge(const float *parts, long chunks, long apart, const float *sink, void *out, long at, long size,
                   const int b16) {
  float largest = sink ? *sink : -INFINITY, sum = 0;
  for (long c = 0; c < chunks; c++) largest = parts[c * apart + size] > largest ? parts[c * apart + size] : largest;
  if (sink) sum = exponential(all(*sink - largest))[0];
  floats total[MOST_SIZE / WIDTH];
  for (long i = 0; i < size / WIDTH; i++) total[i] = all(0);
  for (long c = 0; c < chunks && largest > -INFINITY; c++) {
    const float *part = parts + c * apart;
    const float share = exponential(all(part[size] - largest))[0];
    sum += share * part[size + 1];
    for (long i = 0; i < size / WIDTH; i++) total[i] = fused(load(part, i * WIDTH, 0), all(share), total[i]);
  }
  for (long i = 0; i < size / WIDTH; i++) store(out, at + i * WIDTH, total[i] / all(sum), b16);
}

/* parts: room for batch * heads * rows * chunks * (size + 2) floats. out [batch, rows, heads, size]. */
INLINED void attention(const void *queries, const void *keys, const void *values, const void *mask, const float *sinks,
                       void *out, float *parts, const Sight *of, int threads, const int b16) {
  const long first = of->first / CHUNK, chunks = (of->stop + CHUNK - 1) / CHUNK - first, size = of->size;
  const long together = of->heads / of->kv_heads, number = together * of->rows, groups = of->batch * of->kv_heads;
  const long apart = number * (size + 2);
  const int many = threads > 1 && groups * (of->stop - of->first) * size >= FEW;
  _Pragma("omp parallel num_threads(threads) if (many)") {
    _Pragma("omp for schedule(dynamic) nowait")
    for (long task = 0; task < groups * chunks; task++) {
      const long group = task / chunks, chunk = task % chunks;
      chunk_of(queries, keys, values, mask, parts + task * apart, group / of->kv_heads, group % of->kv_heads,
               (first + chunk) * CHUNK, of, b16);
    }
    _Pragma("omp barrier")
    _Pragma("omp for schedule(static)")
    for (long row = 0; row < groups * number; row++) {
      const long group = row / number, r = row % number;
      const long b = group / of->kv_heads, head = group % of->kv_heads * together + r / of->rows, t = r % of->rows;
      merge(parts + group * chunks * apart + r * (size + 2), chunks, apart, sinks ? sinks + head : 0, out,
            ((b * of->rows + t) * of->heads + head) * size, size, b16);
    }
  }
}

void attention_f32(const float *queries, const float *keys, const float *values, const float *mask, const float *sinks,
                   float *out, float *parts, const Sight *of, int threads) {
  attention(queries, keys, values, mask, sinks, out, parts, of, threads, 0);
}

void attention_b16(const uint16_t *queries, const uint16_t *keys, const uint16_t *values, const uint16_t *mask,
                   const float *sinks, uint16_t *out, float *parts, const Sight *of, int threads) {
  attention(queries, keys, values, mask, sinks, out, parts, of, threads, 1);
}
