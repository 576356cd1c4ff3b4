/* What a layer does to each row beside its linear layers and attention: see rows.py.

   A row's numbers are taken in the same order, whatever rows are beside it. */
#include "functions.h"
#include "vectors.h"

#define SIGNS either((words)((LANES & 1) == 1), all(1.0f), all(-1.0f)) /* of the second number of a pair */
#define SMALL (1 << 15) /* numbers below which other threads are not worth waking */

/* y = x w / sqrt(mean(x^2) + eps), without w: x / sqrt(sum(x^2) + floor). floor: size * eps; size is a multiple of 16 */
INLINED void norm_of(const void *x, const float *weight, void *y, long rows, long size, float floor, int threads,
                     const int b16) {
  const float scale = weight ? sqrtf((float)size) : 1.0f;
  _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 1 && rows * size >= SMALL)")
  for (long row = 0; row < rows; row++) {
    floats squares = {0};
    for (long i = 0; i < size; i += WIDTH) {
      floats one = load(x, row * size + i, b16);
      squares = fused(one, one, squares);
    }
    const floats factor = all(scale / sqrtf(sum_of(squares) + floor));
    for (long i = 0; i < size; i += WIDTH) {
      floats one = load(x, row * size + i, b16) * factor;
      if (weight) one = one * load(weight, i, 0);
      store(y, row * size + i, one, b16);
    }
  }
}

void norm_f32(const float *x, const float *weight, float *y, long rows, long size, float floor, int threads) {
  norm_of(x, weight, y, rows, size, floor, threads, 0);
}

void norm_b16(const uint16_t *x, const float *weight, uint16_t *y, long rows, long size, float floor, int threads) {
  norm_of(x, weight, y, rows, size, floor, threads, 1);
}

/* y = act(gate) up of gate_up [rows, 2 size]. act(x) = x sigmoid(a x + b x^3): silu with a = 1, b = 0, and gelu by tanh
   with a = 2 sqrt(2 / pi), b = 0.044715 a. */
INLINED void gated_of(const void *gate_up, void *y, long rows, long size, float a, float b, int threads,
                      const int b16) {
  _Pragma("omp parallel for schedule(static) collapse(2) num_threads(threads) if (threads > 1 && rows * size >= SMALL)")
  for (long row = 0; row < rows; row++)
    for (long begin = 0; begin < size; begin += 1024) {
      const long end = begin + 1024 < size ? begin + 1024 : size;
      for (long i = begin; i < end; i += WIDTH) {
        floats gate = load(gate_up, 2 * row * size + i, b16), up = load(gate_up, (2 * row + 1) * size + i, b16);
        floats inner = gate * fused(gate * gate, all(b), all(a));
        store(y, row * size + i, gate / (exponential(-inner) + 1.0f) * up, b16);
      }
    }
}

void gated_f32(const float *gate_up, float *y, long rows, long size, float a, float b, int threads) {
  gated_of(gate_up, y, rows, size, a, b, threads, 0);
}

void gated_b16(const uint16_t *gate_up, uint16_t *y, long rows, long size, float a, float b, int threads) {
  gated_of(gate_up, y, rows, size, a, b, threads, 1);
}

/* Norm (norms [heads + kv_heads, size], or NULL) and rotate q and k of qkv [batch, rows, heads + 2 kv_heads, size] by
   rotations (cos and sin in turns, of numbers that lie side by side). Queries stay in qkv. Keys and values go to the
   cache's first columns; where it is NULL, they stay too. */
INLINED void rotated_of(void *qkv, const float *norms, const float *rotations, void *cache, const Heads *of,
                        int threads, const int b16) {
  const long turned = of->heads + of->kv_heads, every = turned + of->kv_heads, size = of->size;
  const long number = of->batch * of->rows;
  _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1 && number * every * size >= SMALL)")
  for (long place = 0; place < number * every; place++) {
    const long row = place / every, head = place % every, b = row / of->rows, t = row % of->rows;
    const long from = row * of->apart + head * size;
    void *to = qkv;
    long at = from;
    if (cache && head >= of->heads) {
      to = cache;
      at = b * of->cache_batch + (head - of->heads) * of->cache_head + t * size;
    }
    if (head >= turned) {
      if (to != qkv)
        for (long i = 0; i < size; i += WIDTH) store(to, at + i, load(qkv, from + i, b16), b16);
      continue;
    }
    floats factor = all(1.0f);
    if (norms) {
      floats squares = {0};
      for (long i = 0; i < size; i += WIDTH) {
        floats one = load(qkv, from + i, b16);
        squares = fused(one, one, squares);
      }
      factor = all(sqrtf((float)size) / sqrtf(sum_of(squares) + of->floor));
    }
    const float *angles = rotations + b * of->rotation_batch + t * of->rotation_row;
    for (long i = 0; i < size; i += WIDTH) {
      floats one = load(qkv, from + i, b16);
      if (norms) one = one * factor * load(norms, head * size + i, 0);
      floats turn = load(angles, i, 0);
      floats cosine = permuted(turn, LANES & ~1u), sine = permuted(turn, LANES | 1) * SIGNS;
      store(to, at + i, fused(one, cosine, permuted(one, LANES ^ 1) * sine), b16);
    }
  }
}

void rotated_f32(float *qkv, const float *norms, const float *rotations, float *cache, const Heads *of, int threads) {
  rotated_of(qkv, norms, rotations, cache, of, threads, 0);
}

void rotated_b16(uint16_t *qkv, const float *norms, const float *rotations, uint16_t *cache, const Heads *of,
                 int threads) {
  rotated_of(qkv, norms, rotations, cache, of, threads, 1);
}
