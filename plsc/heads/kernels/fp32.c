/* float products: HEIGHT rows x 3 vectors of results stay in registers. Compiled per instruction set.
 *
 * Layouts. Queries for logits: panels [B / 16][D][16]. Queries for the update: panels [D / 16][B][16].
 * Rows: unit rows [capacity][D + 16] (the padding of 16 avoids cache set conflicts).
 */
#include "elements.h"
#include "rules.h"

#define HEIGHT (WIDTH == 8 ? 4 : 8) /* AVX2 has 16 registers, the others 32 */
#define PARTS (LANES / WIDTH)       /* vectors in a row of a tile */

static int64_t leading(const struct plan *plan) { return plan->padded_dimension + LANES; }

/* The left factor A(m, k): k iterates over `panels` panels, `panel` floats apart, of `steps` steps each. */
struct left {
  const float *at;
  int64_t steps, panels, panel;
};

/* Where vector v of a row begins, if its tiles are `tile` floats apart. */
INLINE int64_t vector_at(int64_t v, int64_t tile) { return v / PARTS * tile + v % PARTS * WIDTH; }

/* C[HEIGHT][vectors] (+)= A[HEIGHT][k] B[k][vectors], for the vectors [first, first + width). */
INLINE void multiply(const struct left *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_step,
                     int64_t b_tile, float *c, int64_t c_tile, int64_t first, int width, int adds) {
  vec sum[HEIGHT][3];
  const float *columns[3];
UNROLL
  for (int v = 0; v < width; v++) columns[v] = b + vector_at(first + v, b_tile);
UNROLL
  for (int m = 0; m < HEIGHT; m++)
UNROLL
    for (int v = 0; v < width; v++)
      sum[m][v] = adds ? load(c + vector_at(first + v, c_tile) + m * LANES) : (vec){0};
  for (int64_t panel = 0, k = 0; panel < a->panels; panel++) {
    const float *at = a->at + panel * a->panel;
    for (int64_t stop = k + a->steps; k < stop; k++, at += a_step) {
      vec right[3];
UNROLL
      for (int v = 0; v < width; v++) right[v] = load(columns[v] + k * b_step);
UNROLL
      for (int m = 0; m < HEIGHT; m++) {
        vec left = all(at[m * a_row]);
UNROLL
        for (int v = 0; v < width; v++) sum[m][v] += left * right[v];
      }
    }
  }
UNROLL
  for (int m = 0; m < HEIGHT; m++)
UNROLL
    for (int v = 0; v < width; v++) store(c + vector_at(first + v, c_tile) + m * LANES, sum[m][v]);
}

/* Products of HEIGHT rows with one to three vectors, for a number of tiles. */
static int64_t count_steps(int64_t rows, int64_t tiles) {
  return (rows + HEIGHT - 1) / HEIGHT * ((tiles * PARTS + 2) / 3);
}

/* Processes a row of result tiles three vectors at a time; the last two or four in pairs. */
INLINE int next_width(int64_t left) { return left == 1 ? 1 : left == 2 || left == 4 ? 2 : 3; }

INLINE void multiply_some(const struct left *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_step,
                          int64_t b_tile, float *c, int64_t c_tile, int64_t first, int width, int adds) {
  if (width == 3)
    multiply(a, a_row, a_step, b, b_step, b_tile, c, c_tile, first, 3, adds);
  else if (width == 2)
    multiply(a, a_row, a_step, b, b_step, b_tile, c, c_tile, first, 2, adds);
  else
    multiply(a, a_row, a_step, b, b_step, b_tile, c, c_tile, first, 1, adds);
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
  int64_t dimension = plan->rows.dimension, padded = plan->padded_dimension;
  int is_bf16 = plan->rows.is_bf16;
  for (int64_t r = 0; r < round_up(block.rows, HEIGHT); r++) {
    float *out = (float *)scratch->rows + r * leading(plan);
    memset(out + dimension, 0, (size_t)(padded - dimension) * sizeof *out);
    if (r >= block.rows) {
      memset(out, 0, (size_t)dimension * sizeof *out);
      continue;
    }
    const char *row = readable_row(plan, row_position(plan, block.first + r), scratch->decoded);
    float by = plan->rows.cosine ? inverse_length(row, is_bf16, dimension) : 1;
    for (int64_t d = 0; d < dimension; d += WIDTH)
      store(out + d, load_row(row, is_bf16, d, dimension) * by);
  }
}

static void logits(const struct plan *plan, struct scratch *scratch, struct block block, int64_t panel,
                   int panels) {
  int64_t line = leading(plan), column = plan->padded_dimension * LANES, vectors = panels * PARTS;
  int64_t stride = plan->capacity * LANES;
  int64_t lines = lines_per_step(&scratch->prefetch, count_steps(block.rows, panels));
  for (int m = 0; m < block.rows; m += HEIGHT) {
    struct left a = {(float *)scratch->rows + m * line, plan->padded_dimension, 1, 0};
    const float *b = (float *)plan->packed + panel * column;
    float *c = scratch->logits + m * LANES;
    for (int64_t v = 0, width; v < vectors; v += width) {
      width = next_width(vectors - v);
      multiply_some(&a, line, 1, b, LANES, column, c, stride, v, (int)width, 0);
      prefetch_lines(&scratch->prefetch, lines);
    }
  }
}

static void weighted_sum(const struct plan *plan, struct scratch *scratch, struct block block, int64_t panel,
                         int panels) {
  int64_t line = leading(plan), tiles = plan->padded_dimension / LANES;
  int64_t lines = lines_per_step(&scratch->prefetch, count_steps(panels * LANES, tiles));
  for (int64_t v = 0, width; v < tiles * PARTS; v += width) {
    width = next_width(tiles * PARTS - v);
    for (int m = 0; m < panels * LANES; m += HEIGHT) {
      const float *at = scratch->logits + (m / LANES) * plan->capacity * LANES + m % LANES;
      struct left a = {at, block.rows, 1, 0};
      float *c = scratch->result + (panel + m / LANES) * tiles * TILE + (m % LANES) * LANES;
      multiply_some(&a, 1, LANES, scratch->rows, line, LANES, c, TILE, v, (int)width, 1);
      prefetch_lines(&scratch->prefetch, lines);
    }
  }
}

static void row_gradient(const struct plan *plan, struct scratch *scratch, struct block block, int64_t panel,
                         int panels) {
  int64_t tiles = plan->padded_dimension / LANES, column = plan->panels * TILE;
  int64_t lines = lines_per_step(&scratch->prefetch, count_steps(block.rows, tiles));
  const float *b = (float *)plan->packed_for_rows + panel * TILE;
  for (int64_t v = 0, width; v < tiles * PARTS; v += width) {
    width = next_width(tiles * PARTS - v);
    for (int m = 0; m < block.rows; m += HEIGHT) {
      struct left a = {scratch->logits + m * LANES, LANES, panels, plan->capacity * LANES};
      float *c = scratch->result + (m / LANES) * tiles * TILE + (m % LANES) * LANES;
      if (panel)
        multiply_some(&a, LANES, 1, b, LANES, column, c, TILE, v, (int)width, 1);
      else
        multiply_some(&a, LANES, 1, b, LANES, column, c, TILE, v, (int)width, 0);
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
    .exponentials = exponentials,
    .coefficients = coefficients,
    .reduce_panel = reduce_panel,
    .finish_rows = finish_rows,
};

REGISTER(engine)
