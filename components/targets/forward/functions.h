/* The functions of this library and the records that they take. */
#ifndef FUNCTIONS_H
#define FUNCTIONS_H
#include <stdint.h>

/* Of which heads a row of q, k and v consists, and where its keys and values go. */
typedef struct {
  long batch, rows, heads, kv_heads, size; /* size of a head, a multiple of 16 */
  long apart;                              /* numbers from a row of qkv to the next one */
  long rotation_batch, rotation_row;       /* strides of the rotations, in floats */
  long cache_batch, cache_head;            /* strides of the cache, in numbers; a column is `size` long */
  float floor;                             /* size * eps */
} Heads;

/* Of which heads queries consist and which columns they see. */
typedef struct {
  long batch, rows, heads, kv_heads, size;         /* size of a head: a multiple of 16, MOST_SIZE at most */
  long query_batch, query_row;                     /* strides in numbers; heads lie side by side */
  long key_batch, key_head;                        /* of keys and of values alike; columns lie side by side */
  long first, stop;                                /* columns that the first key is and that the last one is before */
  long mask_batch, mask_row;                       /* strides of the mask, whose columns begin at `first` */
  float scale;
} Sight;

#define FUNCTIONS(number, ending)                                                                                      \
  void streamed_##ending(const number *weight, const number *x, const number *bias, number *y, long out, long in,      \
                         long rows, int threads);                                                                      \
  void norm_##ending(const number *x, const float *weight, number *y, long rows, long size, float floor, int threads); \
  void gated_##ending(const number *gate_up, number *y, long rows, long size, float a, float b, int threads);          \
  void rotated_##ending(number *qkv, const float *norms, const float *rotations, number *cache, const Heads *of,       \
                        int threads);                                                                                  \
  void attention_##ending(const number *queries, const number *keys, const number *values, const number *mask,         \
                          const float *sinks, number *out, float *parts, const Sight *of, int threads);
FUNCTIONS(float, f32)
FUNCTIONS(uint16_t, b16)
#endif
