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

#define LANES 16                 /* floats per vector, samples per panel */
#define TILE (LANES * LANES)     /* floats per result tile */
#define CHUNK 128                /* samples per chunk */
#define FACTOR_TILE 1024         /* bytes per packed bfloat16 tile of 16 x 32 */

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

/* Matrix products for one instruction set. Packing converts inputs into the layout of the engine. */
struct engine {
  int64_t forward_rows, update_rows; /* rows per block, multiples of 32 */
  size_t row_bytes;                  /* scratch bytes per padded row and padded dimension */
  size_t operand_bytes;              /* scratch bytes per element of a chunk of logits */
  size_t query_bytes;                /* bytes per element of the padded batch */
  int uses_tiles;                    /* whether threads must configure AMX tile registers */
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
};

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

/* One per file (fp32.c, bf16.c, tiles.c); NULL if the compiler does not support the instructions. */
const struct engine *plsc_fp32_engine(void);
const struct engine *plsc_vector_engine(void);
const struct engine *plsc_tiles_engine(void);
void plsc_tiles_begin(void);
void plsc_tiles_end(void);

/* bf16.c: the layouts of both bfloat16 engines, which differ only in `multiply`. */
struct factors {
  const char *left;   /* packed tiles [m / 16][k / 32], rows of 32 values */
  size_t left_stride; /* bytes from one m / 16 to the next */
  const char *right;  /* packed tiles [n / 16][k / 32], pairs of k interleaved */
  size_t right_stride;
  float *result;      /* tiles */
  int64_t result_m, result_n; /* floats from one tile to the next */
  int m, n, k;        /* in tiles */
  int adds; /* whether to add to the result */
};
typedef void plsc_multiply(const struct factors *, struct prefetch *);
void plsc_bf16_pack_queries(const struct plan *, int64_t panel);
void plsc_bf16_pack_rows(const struct plan *, struct scratch *, struct block);
void plsc_bf16_logits(plsc_multiply *, const struct plan *, struct scratch *, struct block, int64_t, int);
void plsc_bf16_weighted_sum(plsc_multiply *, const struct plan *, struct scratch *, struct block, int64_t,
                            int);
void plsc_bf16_row_gradient(plsc_multiply *, const struct plan *, struct scratch *, struct block, int64_t,
                            int);

/* elements.c */
void plsc_exponentials(const struct plan *, struct scratch *, struct block, int64_t panel, int panels);
void plsc_coefficients(const struct plan *, struct scratch *, struct block, int64_t panel, int panels);
void plsc_reduce_panel(const struct plan *, int64_t panel);

/* rules.c */
void plsc_finish_rows(const struct plan *, struct scratch *, struct block);

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
