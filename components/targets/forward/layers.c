/* All layers of a pass of few rows, one function after the other without Python in between: see layers.py.

   Each step is the function that runs it alone, so that a row has the same bits either way. */
#include "functions.h"
#include "vectors.h"

/* A layer's weights, or those after attention; biases, norms and sinks may be NULL. view, rope: which of the pass's it
   takes. */
typedef struct {
  const void *qkv, *qkv_bias, *out, *out_bias, *gate_up, *gate_up_bias, *down, *down_bias;
  const float *attention_norm, *mlp_norm, *head_norms, *sinks;
  long view, rope;
} Layer;

/* What layers of one window see: columns from `first` on, by a mask (or NULL) with these strides. */
typedef struct {
  const void *mask;
  long first, batch, row;
} View;

/* Rotations of the rows and their strides, in floats. */
typedef struct {
  const float *angles;
  long batch, row;
} Rope;

typedef struct {
  long layers, batch, rows, hidden, inner, heads, kv_heads, size;
  long cache_layer, cache_batch, cache_head, start; /* strides of the cache in numbers; the rows' first column */
  float floor, head_floor, scale, gate_a, gate_b;
} Pass;

INLINED void add(const void *a, const void *b, void *sum, long number, const int b16) {
  for (long i = 0; i < number; i += WIDTH) store(sum, i, load(a, i, b16) + load(b, i, b16), b16);
}

/* y = h + mlp(h) with h = residual + out(mixed): what follows attention. room: as layers.py says. */
#define FINISH(number, ending, b16)                                                                                    \
  void finish_##ending(const number *residual, const number *mixed, number *y, number *room, const Layer *layer,       \
                       const Pass *of, int threads) {                                                                  \
    const long count = of->batch * of->rows, hidden = of->hidden, inner = of->inner;                                   \
    number *normed = room, *added = normed + count * hidden, *gate_up = added + count * hidden;                        \
    number *gated = gate_up + 2 * count * inner;                                                                       \
    streamed_##ending(layer->out, mixed, layer->out_bias, added, hidden, of->heads * of->size, count, threads);        \
    add(residual, added, y, count *hidden, b16);                                                                       \
    norm_##ending(y, layer->mlp_norm, normed, count, hidden, of->floor, threads);                                      \
    streamed_##ending(layer->gate_up, normed, layer->gate_up_bias, gate_up, 2 * inner, hidden, count, threads);        \
    gated_##ending(gate_up, gated, count, inner, of->gate_a, of->gate_b, threads);                                     \
    streamed_##ending(layer->down, gated, layer->down_bias, added, hidden, inner, count, threads);                     \
    add(y, added, y, count *hidden, b16);                                                                              \
  }
FINISH(float, f32, 0)
FINISH(uint16_t, b16, 1)

/* states [layers + 1, batch * rows, hidden]: the first is given, each layer writes the next. room: of numbers as large
   as layers.py says; parts: for attention. */
#define LAYERS(number, ending)                                                                                         \
  void layers_##ending(number *states, number *cache, number *room, float *parts, const Layer *layers,                 \
                       const View *views, const Rope *ropes, const Pass *of, int threads) {                            \
    const long count = of->batch * of->rows, hidden = of->hidden, size = of->size;                                     \
    const long asked = of->heads * size, apart = asked + 2 * of->kv_heads * size;                                      \
    number *normed = room, *qkv = room + count * (2 * hidden + 3 * of->inner), *mixed = qkv + count * apart;           \
    for (long i = 0; i < of->layers; i++) {                                                                            \
      const Layer *layer = layers + i;                                                                                 \
      const View *view = views + layer->view;                                                                          \
      const Rope *rope = ropes + layer->rope;                                                                          \
      number *x = states + i * count * hidden;                                                                         \
      number *columns = cache + i * of->cache_layer, *keys = columns + view->first * size;                             \
      const Heads heads = {of->batch, of->rows, of->heads, of->kv_heads, size, apart, rope->batch, rope->row,          \
                           of->cache_batch, of->cache_head, of->head_floor};                                           \
      const Sight sight = {of->batch, of->rows, of->heads, of->kv_heads, size, of->rows * apart, apart,                \
                           of->cache_batch, of->cache_head, view->first, of->start + of->rows, view->batch, view->row, \
                           of->scale};                                                                                 \
      norm_##ending(x, layer->attention_norm, normed, count, hidden, of->floor, threads);                              \
      streamed_##ending(layer->qkv, normed, layer->qkv_bias, qkv, apart, hidden, count, threads);                      \
      rotated_##ending(qkv, layer->head_norms, rope->angles, columns + of->start * size, &heads, threads);             \
      attention_##ending(qkv, keys, keys + of->kv_heads * of->cache_head, view->mask, layer->sinks, mixed, parts,      \
                         &sight, threads);                                                                             \
      finish_##ending(x, mixed, x + count * hidden, room, layer, of, threads);                                         \
    }                                                                                                                  \
  }
LAYERS(float, f32)
LAYERS(uint16_t, b16)
