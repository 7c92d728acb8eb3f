/* What the parts of a pass share: the plan of a call, the scratch of a thread, and the engines.
 *
 * A pass goes over blocks of rows, and within a block over chunks of samples. Matrices of results are
 * stored as tiles: 16 rows x 16 columns of floats, 1 KiB in sequence, so that every engine writes and
 * every elementwise part reads whole cache lines. The matrix of logits of a chunk is a sequence of
 * panels, one for 16 samples: panel[row][sample].
 */
#ifndef PLSC_PASS_H
#define PLSC_PASS_H

#include <stddef.h>
#include <stdint.h>

#include "native.h"

#define LANES 16                 /* floats in a vector: samples of a panel */
#define TILE (LANES * LANES)     /* floats in a tile of results */
#define CHUNK 128                /* samples in a chunk */
#define FACTOR_TILE 1024         /* bytes of a packed tile of bfloat16: 16 x 32 */

struct plan;
struct scratch;

/* Some rows in sequence. */
struct block {
  int64_t first; /* position of its first row among the n */
  int rows;      /* rows in it */
};

/* Lines of memory that will be needed for the next block, fetched bit by bit between products. */
struct ahead {
  const char *base[3];
  size_t row_bytes[3];
  int arrays;
  const int64_t *position;
  int64_t row, end;
  int array;
  size_t byte;
  int64_t lines_a_product;
};

/* Matrix products in one number format. Packing brings factors into the engine's own layout. */
struct engine {
  int64_t forward_rows, update_rows; /* rows in a block, multiples of 32 */
  size_t row_bytes;                  /* scratch for each padded row and padded dimension */
  size_t operand_bytes;              /* scratch for each element of a chunk of logits */
  size_t query_bytes;                /* for each element of the padded batch */
  int uses_tiles;                    /* whether threads must set up tile registers */
  /* Packs the queries of a panel, both ways (the second only for the update). */
  void (*pack_queries)(const struct plan *, int64_t panel);
  /* Reads the rows of a block, normalises and packs them. */
  void (*pack_rows)(const struct plan *, struct scratch *, struct block);
  /* logits[row][sample] of a chunk of panels. */
  void (*logits)(const struct plan *, struct scratch *, struct block, int64_t panel, int panels);
  /* weighted[sample][d] += sum over rows of what logits became. */
  void (*mix)(const struct plan *, struct scratch *, struct block, int64_t panel, int panels);
  /* gradient[row][d] (+)= sum over samples of what logits became. */
  void (*combine)(const struct plan *, struct scratch *, struct block, int64_t panel, int panels);
};

/* Everything about a call that its threads only read. */
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
  int64_t panels;          /* of samples, an even number */
  /* Per sample, padded. */
  float *shift, *threshold, *weight, *coefficient, *factor;
  int32_t *target_class, *target_row;
  /* Queries in the engine's layout: for logits, and for the update. */
  void *packed, *packed_for_rows;
  float *out, *bias_out;
  float *weighted_out, *total_out, *shift_out;
  uint16_t *kept;
  struct scratch *scratch; /* [threads] */
  int64_t next_block;      /* of the update, atomic */
};

struct scratch {
  float *logits;       /* [panels of a chunk][capacity][16] */
  float *result;       /* tiles: weighted [panels][D / 16], or row gradients [capacity / 16][D / 16] */
  void *rows, *rows_for_weighted;
  void *operand;
  float *bias_sums;    /* [capacity][16] */
  double *total;       /* [samples] */
  float *maximum;      /* [samples], online shift */
  struct ahead ahead;
};

/* threads.c: calls work(context, i) for i in 0..count-1, side by side. */
void plsc_parallel(void (*work)(void *, int), void *context, int count);

/* One of each per file of the same name; NULL where the compiler could not build it. */
const struct engine *plsc_fp32_engine(void);
const struct engine *plsc_vector_engine(void);
const struct engine *plsc_tiles_engine(void);
void plsc_tiles_begin(void);
void plsc_tiles_end(void);

/* bf16.c: layouts that both bfloat16 engines share; they differ in `multiply`. */
struct factors {
  const char *left;   /* packed tiles [m / 16][k / 32], rows of 32 numbers */
  size_t left_stride; /* bytes from one m / 16 to the next */
  const char *right;  /* packed tiles [n / 16][k / 32], pairs of k side by side */
  size_t right_stride;
  float *result;      /* tiles */
  int64_t result_m, result_n; /* floats from one tile to the next */
  int m, n, k;        /* in tiles */
  int adds;
};
typedef void plsc_multiply(const struct factors *, struct ahead *);
void plsc_bf16_pack_queries(const struct plan *, int64_t panel);
void plsc_bf16_pack_rows(const struct plan *, struct scratch *, struct block);
void plsc_bf16_logits(plsc_multiply *, const struct plan *, struct scratch *, struct block, int64_t, int);
void plsc_bf16_mix(plsc_multiply *, const struct plan *, struct scratch *, struct block, int64_t, int);
void plsc_bf16_combine(plsc_multiply *, const struct plan *, struct scratch *, struct block, int64_t, int);

/* elements.c */
void plsc_exponentials(const struct plan *, struct scratch *, struct block, int64_t panel, int panels);
void plsc_coefficients(const struct plan *, struct scratch *, struct block, int64_t panel, int panels);
void plsc_reduce_panel(const struct plan *, int64_t panel);

/* rules.c */
void plsc_finish_rows(const struct plan *, struct scratch *, struct block);

static inline int64_t row_position(const struct plan *plan, int64_t row) {
  return plan->rows.position ? plan->rows.position[row] : row;
}

static inline int64_t round_up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

/* How many lines to fetch after each of the steps of a product. */
static inline int64_t lines_a_step(const struct ahead *ahead, int64_t steps) {
  return (ahead->lines_a_product + steps - 1) / steps;
}

/* Fetches some of the next block's lines into the second-level cache. */
static inline void fetch_ahead(struct ahead *ahead, int64_t lines) {
  while (lines > 0 && ahead->row < ahead->end) {
    int64_t position = ahead->position ? ahead->position[ahead->row] : ahead->row;
    size_t width = ahead->row_bytes[ahead->array];
    const char *line = ahead->base[ahead->array] + (size_t)position * width;
    while (lines > 0 && ahead->byte < width) {
      __builtin_prefetch(line + ahead->byte, 0, 2);
      ahead->byte += 64;
      lines--;
    }
    if (ahead->byte >= width) {
      ahead->byte = 0;
      if (++ahead->array == ahead->arrays) {
        ahead->array = 0;
        ahead->row++;
      }
    }
  }
}

#endif
