/* Structures shared by the forward and the update kernel: the plan of a call, the scratch memory of a thread,
 * and the matrix multiplication engines.
 *
 * A kernel iterates over blocks of class weights (rows), and within a block over chunks of samples. Result
 * matrices are stored as tiles of 16 x 16 floats, 1 KiB each, so that all accesses are to whole cache lines.
 * The logits of a chunk are a sequence of panels, one per 16 samples: panel[row][sample].
 */
#ifndef PLSC_PASS_H
#define PLSC_PASS_H

#include <stddef.h>
#include <stdint.h>

#include "native.h"

#define LANES 16                 /* samples per panel */
#define TILE (LANES * LANES)     /* floats per result tile */
#define CHUNK 128                /* samples per chunk */

struct plan;
struct scratch;

/* Consecutive selected rows. */
struct block {
  int64_t first; /* index of its first row among the n selected ones */
  int rows;      /* number of rows */
};

/* Cache lines of the next block, prefetched a few at a time during the products of this block. */
struct prefetch {
  const char *base[3];
  size_t row_bytes[3];
  int arrays;
  const int64_t *position;
  int64_t row, end;
  int array;
  size_t byte;
  int64_t lines_per_product;
};

/* The operations on a block, for one instruction set. Packing converts inputs into the layout of the products. */
struct engine {
  int64_t forward_rows, update_rows; /* rows per block, multiples of 32 */
  size_t row_bytes;                  /* scratch bytes per padded row and padded dimension */
  size_t operand_bytes;              /* scratch bytes per element of a chunk of logits */
  size_t query_bytes;                /* bytes per element of the padded batch */
  void (*begin)(void), (*end)(void); /* prepare and release registers of the thread, or NULL */
  /* Packs the queries of a panel, in both layouts (the second only for the update). */
  void (*pack_queries)(const struct plan *, int64_t panel);
  /* Reads, normalises and packs the rows of a block. */
  void (*pack_rows)(const struct plan *, struct scratch *, struct block);
  /* logits[row][sample] of a chunk of panels. */
  void (*logits)(const struct plan *, struct scratch *, struct block, int64_t panel, int panels);
  /* weighted[sample][d] += sum over rows of exponential * row. */
  void (*weighted_sum)(const struct plan *, struct scratch *, struct block, int64_t panel, int panels);
  /* gradient[row][d] (+)= sum over samples of coefficient * query. */
  void (*row_gradient)(const struct plan *, struct scratch *, struct block, int64_t panel, int panels);
  /* Replaces a chunk of logits by exponentials and adds to the totals; or by gradient coefficients. */
  void (*exponentials)(const struct plan *, struct scratch *, struct block, int64_t panel, int panels);
  void (*coefficients)(const struct plan *, struct scratch *, struct block, int64_t panel, int panels);
  /* Adds the sums of all threads. */
  void (*reduce_panel)(const struct plan *, int64_t panel);
  /* Updates the rows of a block with their gradients. */
  void (*finish_rows)(const struct plan *, struct scratch *, struct block);
};

/* The engines that the compiler could build; each adds itself when the library is loaded. setup.py compiles an
 * engine with the flags of its instruction set, and its number in native.h as ENGINE. */
extern const struct engine *plsc_engines[PLSC_ENGINES];
#define REGISTER(engine) \
  __attribute__((constructor)) static void add_engine(void) { plsc_engines[ENGINE] = &engine; }

/* The data of a call that its threads share, read-only except for next_block and the results. */
struct plan {
  struct plsc_rows rows;
  struct plsc_queries queries;
  struct plsc_gradient gradient;
  struct plsc_rule rule;
  const struct engine *engine;
  int threads;
  int is_update, fixed, want_weighted;
  int64_t begin, end;      /* rows */
  int64_t block_rows;      /* a multiple of K, at most capacity */
  int64_t capacity;        /* a multiple of 32 */
  int64_t padded_dimension; /* a multiple of 32 */
  int64_t panels;          /* number of panels of samples, even */
  /* Per sample, padded. */
  float *shift, *threshold, *weight, *coefficient, *factor;
  int32_t *target_class, *target_row;
  /* Queries in the layout of the engine: for logits, and for the update. */
  void *packed, *packed_for_rows;
  float *out, *bias_out;
  float *weighted_out, *total_out, *shift_out;
  uint16_t *kept;
  struct scratch *scratch; /* [threads] */
  int64_t next_block;      /* next block of the update, atomic */
};

struct scratch {
  float *logits;       /* [panels of a chunk][capacity][16] */
  float *result;       /* tiles: weighted [panels][D / 16], or row gradients [capacity / 16][D / 16] */
  void *rows, *rows_for_weighted;
  void *operand;
  float *bias_sums;    /* [capacity][16] */
  float *decoded;      /* [2][padded dimension], of 8-bit rows */
  double *total;       /* [samples] */
  float *maximum;      /* [samples], running maximum */
  struct prefetch prefetch;
};

/* threads.c: calls work(context, i) for i in 0..count-1, in parallel. */
void plsc_parallel(void (*work)(void *, int), void *context, int count);

/* Bytes of a row of class weights. */
static inline int64_t row_bytes(const struct plsc_rows *rows) {
  if (rows->is_coded) return rows->dimension + (int64_t)sizeof(float);
  return rows->dimension * (rows->is_bf16 ? 2 : 4);
}

static inline int64_t row_position(const struct plan *plan, int64_t row) {
  return plan->rows.position ? plan->rows.position[row] : row;
}

static inline int64_t round_up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

/* Number of cache lines to prefetch after each step of a product. */
static inline int64_t lines_per_step(const struct prefetch *prefetch, int64_t steps) {
  return (prefetch->lines_per_product + steps - 1) / steps;
}

/* Prefetches cache lines of the next block into the L2 cache. */
static inline void prefetch_lines(struct prefetch *prefetch, int64_t lines) {
  while (lines > 0 && prefetch->row < prefetch->end) {
    int64_t position = prefetch->position ? prefetch->position[prefetch->row] : prefetch->row;
    size_t width = prefetch->row_bytes[prefetch->array];
    const char *line = prefetch->base[prefetch->array] + (size_t)position * width;
    while (lines > 0 && prefetch->byte < width) {
      __builtin_prefetch(line + prefetch->byte, 0, 2);
      prefetch->byte += 64;
      lines--;
    }
    if (prefetch->byte >= width) {
      prefetch->byte = 0;
      if (++prefetch->array == prefetch->arrays) {
        prefetch->array = 0;
        prefetch->row++;
      }
    }
  }
}

#endif
