/* float products on AVX-512: 8 rows x 3 vectors of results stay in registers.
 *
 * Layouts. Queries for logits: panels [B / 16][D][16]. Queries for the update: panels [D / 16][B][16].
 * Rows: unit rows [capacity][D + 16] (the padding of 16 avoids cache set conflicts).
 */
#include "pass.h"

#if defined(__AVX512F__)
#include "vector.h"

#define HEIGHT 8

static int64_t leading(const struct plan *plan) { return plan->padded_dimension + LANES; }

/* The left factor A(m, k): k iterates over `panels` panels, `panel` floats apart, of `steps` steps each. */
struct left {
  const float *at;
  int64_t steps, panels, panel;
};

/* C[8][width x 16] (+)= A[8][k] B[k][width x 16]; the results are tiles. */
INLINE void multiply(const struct left *a, int64_t a_row, int64_t a_step, const float *b,
                     int64_t b_step, int64_t b_vector, float *c, int64_t c_vector, int width, int adds) {
  __m512 sum[HEIGHT][3];
#pragma GCC unroll 8
  for (int m = 0; m < HEIGHT; m++)
#pragma GCC unroll 3
    for (int v = 0; v < width; v++)
      sum[m][v] = adds ? _mm512_load_ps(c + v * c_vector + m * LANES) : _mm512_setzero_ps();
  for (int64_t panel = 0; panel < a->panels; panel++) {
    const float *at = a->at + panel * a->panel;
    for (int64_t k = 0; k < a->steps; k++, at += a_step, b += b_step) {
      __m512 right[3];
#pragma GCC unroll 3
      for (int v = 0; v < width; v++) right[v] = _mm512_load_ps(b + v * b_vector);
#pragma GCC unroll 8
      for (int m = 0; m < HEIGHT; m++) {
        __m512 left = _mm512_set1_ps(at[m * a_row]);
#pragma GCC unroll 3
        for (int v = 0; v < width; v++) sum[m][v] = _mm512_fmadd_ps(left, right[v], sum[m][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < HEIGHT; m++)
#pragma GCC unroll 3
    for (int v = 0; v < width; v++) _mm512_store_ps(c + v * c_vector + m * LANES, sum[m][v]);
}

/* Products of 8 rows with one to three vectors. */
static int64_t count_steps(int64_t rows, int64_t vectors) {
  return (rows + HEIGHT - 1) / HEIGHT * ((vectors + 2) / 3);
}

/* Processes a row of result tiles three vectors at a time; the last two or four in pairs. */
INLINE int next_width(int64_t left) { return left == 1 ? 1 : left == 2 || left == 4 ? 2 : 3; }

INLINE void multiply_some(const struct left *a, int64_t a_row, int64_t a_step, const float *b,
                          int64_t b_step, int64_t b_vector, float *c, int64_t c_vector, int width,
                          int adds) {
  if (width == 3)
    multiply(a, a_row, a_step, b, b_step, b_vector, c, c_vector, 3, adds);
  else if (width == 2)
    multiply(a, a_row, a_step, b, b_step, b_vector, c, c_vector, 2, adds);
  else
    multiply(a, a_row, a_step, b, b_step, b_vector, c, c_vector, 1, adds);
}

static void pack_queries(const struct plan *plan, int64_t panel) {
  int64_t dimension = plan->rows.dimension, count = plan->queries.count;
  int64_t padded = plan->padded_dimension, batch = plan->panels * LANES;
  float *forward = (float *)plan->packed + panel * padded * LANES;
  float *backward = plan->packed_for_rows;
  for (int64_t i = 0; i < LANES; i++) {
    int64_t b = panel * LANES + i;
    for (int64_t d = 0; d < padded; d++) {
      float x = b < count && d < dimension ? plan->queries.unit[b * dimension + d] : 0;
      forward[d * LANES + i] = x;
      if (backward) backward[((d / LANES) * batch + b) * LANES + d % LANES] = x;
    }
  }
}

static void pack_rows(const struct plan *plan, struct scratch *scratch, struct block block) {
  int64_t dimension = plan->rows.dimension, line = leading(plan);
  int is_bf16 = plan->rows.is_bf16;
  int64_t padded = round_up(block.rows, HEIGHT);
  for (int64_t r = 0; r < padded; r++) {
    float *out = (float *)scratch->rows + r * line;
    if (r >= block.rows) {
      for (int64_t i = 0; i < plan->padded_dimension / 16; i++)
        _mm512_store_ps(out + 16 * i, _mm512_setzero_ps());
      continue;
    }
    const char *row = readable_row(plan, row_position(plan, block.first + r), scratch->decoded);
    __m512 by = _mm512_set1_ps(plan->rows.cosine ? inverse_length(row, is_bf16, dimension) : 1);
    for (int64_t i = 0; i < plan->padded_dimension / 16; i++) {
      __m512 w = load_row(row, is_bf16, i, row_mask(i, dimension));
      _mm512_store_ps(out + 16 * i, _mm512_mul_ps(w, by));
    }
  }
}

static void logits(const struct plan *plan, struct scratch *scratch, struct block block, int64_t panel,
                   int panels) {
  int64_t line = leading(plan), column = plan->padded_dimension * LANES;
  int64_t stride = plan->capacity * LANES;
  int64_t lines = lines_per_step(&scratch->prefetch, count_steps(block.rows, panels));
  for (int m = 0; m < block.rows; m += HEIGHT) {
    struct left a = {(float *)scratch->rows + m * line, plan->padded_dimension, 1, 0};
    const float *b = (float *)plan->packed + panel * column;
    float *c = scratch->logits + m * LANES;
    for (int v = 0, width; v < panels; v += width) {
      width = next_width(panels - v);
      multiply_some(&a, line, 1, b + v * column, LANES, column, c + v * stride, stride, width, 0);
      prefetch_lines(&scratch->prefetch, lines);
    }
  }
}

static void weighted_sum(const struct plan *plan, struct scratch *scratch, struct block block, int64_t panel,
                int panels) {
  int64_t line = leading(plan), tiles = plan->padded_dimension / LANES;
  int64_t lines = lines_per_step(&scratch->prefetch, count_steps(panels * LANES, tiles));
  for (int64_t v = 0, width; v < tiles; v += width) {
    width = next_width(tiles - v);
    for (int m = 0; m < panels * LANES; m += HEIGHT) {
      const float *at = scratch->logits + (m / LANES) * plan->capacity * LANES + m % LANES;
      struct left a = {at, block.rows, 1, 0};
      float *c = scratch->result + ((panel + m / LANES) * tiles + v) * TILE + (m % LANES) * LANES;
      const float *b = (float *)scratch->rows + v * LANES;
      multiply_some(&a, 1, LANES, b, line, LANES, c, TILE, width, 1);
      prefetch_lines(&scratch->prefetch, lines);
    }
  }
}

static void row_gradient(const struct plan *plan, struct scratch *scratch, struct block block,
                    int64_t panel, int panels) {
  int64_t tiles = plan->padded_dimension / LANES, column = plan->panels * TILE;
  int64_t lines = lines_per_step(&scratch->prefetch, count_steps(block.rows, tiles));
  for (int64_t v = 0, width; v < tiles; v += width) {
    width = next_width(tiles - v);
    for (int m = 0; m < block.rows; m += HEIGHT) {
      struct left a = {scratch->logits + m * LANES, LANES, panels, plan->capacity * LANES};
      const float *b = (float *)plan->packed_for_rows + v * column + panel * TILE;
      float *c = scratch->result + ((m / LANES) * tiles + v) * TILE + (m % LANES) * LANES;
      if (panel)
        multiply_some(&a, LANES, 1, b, LANES, column, c, TILE, width, 1);
      else
        multiply_some(&a, LANES, 1, b, LANES, column, c, TILE, width, 0);
      prefetch_lines(&scratch->prefetch, lines);
    }
  }
}

static const struct engine engine = {
    .forward_rows = 128,
    .update_rows = 64,
    .row_bytes = sizeof(float),
    .query_bytes = sizeof(float),
    .pack_queries = pack_queries,
    .pack_rows = pack_rows,
    .logits = logits,
    .weighted_sum = weighted_sum,
    .row_gradient = row_gradient,
};

const struct engine *plsc_fp32_engine(void) { return &engine; }
#else
const struct engine *plsc_fp32_engine(void) { return 0; }
#endif
