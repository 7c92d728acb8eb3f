/* bfloat16 products with float sums. Compiled twice: for AVX512-BF16, and for AMX, which differ in `multiply`.
 *
 * A packed tile holds 16 x 32 values in 1 KiB. Left factor: 16 rows of 32 k. Right factor: 16 pairs of k,
 * each with 16 columns x 2. A factor is [tiles of rows or columns][tiles of k].
 */
#include "elements.h"
#include "rules.h"

#define DEPTH 32         /* k in a packed tile */
#define FACTOR_TILE 1024 /* its bytes */

struct factors {
  const char *left;   /* packed tiles [m / 16][k / 32], rows of 32 values */
  size_t left_stride; /* bytes from one m / 16 to the next */
  const char *right;  /* packed tiles [n / 16][k / 32], pairs of k interleaved */
  size_t right_stride;
  float *result;      /* tiles */
  int64_t result_m, result_n; /* floats from one tile to the next */
  int m, n, k;        /* in tiles */
  int adds;           /* whether to add to the result */
};

#if defined(TILES)
#include "tiles.h"
#else
#define FORWARD_ROWS 128
#define BEGIN 0
#define END 0
#define HEIGHT 8

/* 8 rows x 2 vectors. */
INLINE void multiply_some(const struct factors *f, int m, int n, int width) {
  const char *left = f->left + (m / 16) * f->left_stride + (m % 16) * 64;
  const char *right = f->right + n * f->right_stride;
  float *result = f->result + (m / 16) * f->result_m + n * f->result_n + (m % 16) * LANES;
  __m512 sum[HEIGHT][2];
  __mmask16 adds = f->adds ? 0xffff : 0;
UNROLL
  for (int i = 0; i < HEIGHT; i++)
UNROLL
    for (int v = 0; v < width; v++)
      sum[i][v] = _mm512_maskz_load_ps(adds, result + v * f->result_n + i * LANES);
  for (int k = 0; k < f->k; k++)
    for (int pair = 0; pair < 16; pair++) {
      __m512bh columns[2];
UNROLL
      for (int v = 0; v < width; v++)
        columns[v] = (__m512bh)_mm512_load_si512(right + v * f->right_stride + k * FACTOR_TILE + pair * 64);
UNROLL
      for (int i = 0; i < HEIGHT; i++) {
        int both;
        memcpy(&both, left + k * FACTOR_TILE + i * 64 + pair * 4, sizeof both);
        __m512bh row = (__m512bh)_mm512_set1_epi32(both);
UNROLL
        for (int v = 0; v < width; v++) sum[i][v] = _mm512_dpbf16_ps(sum[i][v], row, columns[v]);
      }
    }
UNROLL
  for (int i = 0; i < HEIGHT; i++)
UNROLL
    for (int v = 0; v < width; v++) _mm512_store_ps(result + v * f->result_n + i * LANES, sum[i][v]);
}

static void multiply(const struct factors *f, struct prefetch *prefetch) {
  int64_t lines = lines_per_step(prefetch, (int64_t)(f->n + 1) / 2 * 2 * f->m);
  for (int n = 0; n < f->n; n += 2)
    for (int m = 0; m < 16 * f->m; m += HEIGHT) {
      if (n + 1 < f->n)
        multiply_some(f, m, n, 2);
      else
        multiply_some(f, m, n, 1);
      prefetch_lines(prefetch, lines);
    }
}
#endif

/* Two vectors of floats as 32 bfloat16, `low` first. */
INLINE __m512i narrow_two(__m512 high, __m512 low) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

/* 32 bfloat16 a0..a15 b0..b15 as pairs a0 b0 a1 b1 ... */
INLINE __m512i interleave(__m512i halves) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, halves);
}

/* Transposes 16 vectors of 16 32-bit elements. */
INLINE void transpose(__m512i v[16]) {
  __m512i t[16];
UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
UNROLL
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
UNROLL
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
  }
UNROLL
  for (int i = 0; i < 4; i++) {
    v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    v[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    v[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

/* As right factors: for logits columns are samples and k is d; for the update the other way round. */
static void pack_queries(const struct plan *plan, int64_t panel) {
  int64_t dimension = plan->rows.dimension, count = plan->queries.count;
  int64_t padded = plan->padded_dimension, batch = plan->panels * LANES;
  uint16_t *forward = (uint16_t *)plan->packed + panel * padded * LANES;
  uint16_t *backward = plan->packed_for_rows;
  halves x = {0};
  for (int64_t i = 0; i < LANES; i++) {
    int64_t b = panel * LANES + i, known = b < count ? dimension : 0;
    for (int64_t d = 0; d < padded; d++) {
      if (d % WIDTH == 0) x = narrow_bf16(load_row(plan->queries.unit + b * dimension, 0, d, known));
      forward[(d / 2) * 2 * LANES + 2 * i + d % 2] = x[d % WIDTH];
      if (backward)
        backward[(d / LANES) * batch * LANES + (b / 2) * 2 * LANES + d % LANES * 2 + b % 2] = x[d % WIDTH];
    }
  }
}

/* Bytes from one tile of columns to the next in rows_for_weighted; an additional line avoids cache set conflicts. */
static size_t weighted_stride(const struct plan *plan) { return plan->capacity / DEPTH * FACTOR_TILE + 64; }

/* Unit rows as a left factor (k is d) and, for the weighted sum, as a right factor (k is the row).
 * whole: there are two rows, and D is a multiple of DEPTH. */
INLINE void pack_pair(const struct plan *plan, struct scratch *scratch, int64_t r, const char *const row[2],
                      const float inverse[2], int is_bf16, int whole) {
  int64_t dimension = plan->rows.dimension, depth = plan->padded_dimension / DEPTH;
  char *left = (char *)scratch->rows + (r / 16) * depth * FACTOR_TILE + (r % 16) * 64;
  char *right = (char *)scratch->rows_for_weighted + (r / DEPTH) * FACTOR_TILE + (r % DEPTH) / 2 * 64;
  size_t stride = weighted_stride(plan);
  for (int64_t i = 0; i < depth; i++) {
    __m512 w[2][2];
    for (int p = 0; p < 2; p++)
      for (int h = 0; h < 2; h++) {
        int64_t d = (2 * i + h) * WIDTH, count = whole ? d + WIDTH : row[p] ? dimension : 0;
        w[p][h] = load_row(row[p], is_bf16, d, count) * inverse[p];
      }
    _mm512_store_si512(left + i * FACTOR_TILE, narrow_two(w[0][1], w[0][0]));
    _mm512_store_si512(left + i * FACTOR_TILE + 64, narrow_two(w[1][1], w[1][0]));
    if (!plan->want_weighted) continue;
    for (int h = 0; h < 2; h++)
      _mm512_store_si512(right + (2 * i + h) * stride, interleave(narrow_two(w[1][h], w[0][h])));
  }
}

static void pack_rows(const struct plan *plan, struct scratch *scratch, struct block block) {
  int64_t dimension = plan->rows.dimension, padded = round_up(block.rows, DEPTH);
  int is_bf16 = plan->rows.is_bf16;
  for (int64_t r = 0; r < padded; r += 2) {
    const char *row[2] = {0, 0};
    float inverse[2] = {1, 1};
    for (int p = 0; p < 2 && r + p < block.rows; p++) {
      int64_t position = row_position(plan, block.first + r + p);
      row[p] = readable_row(plan, position, scratch->decoded + p * plan->padded_dimension);
      if (plan->rows.cosine) inverse[p] = inverse_length(row[p], is_bf16, dimension);
    }
    int whole = row[1] && dimension % DEPTH == 0;
    if (is_bf16 && whole)
      pack_pair(plan, scratch, r, row, inverse, 1, 1);
    else if (whole)
      pack_pair(plan, scratch, r, row, inverse, 0, 1);
    else
      pack_pair(plan, scratch, r, row, inverse, is_bf16, 0);
  }
}

static void logits(const struct plan *plan, struct scratch *scratch, struct block block, int64_t panel,
                   int panels) {
  size_t depth = plan->padded_dimension / DEPTH, bytes = depth * FACTOR_TILE;
  struct factors factors = {
      .left = scratch->rows, .left_stride = bytes,
      .right = (char *)plan->packed + panel * bytes, .right_stride = bytes,
      .result = scratch->logits, .result_m = TILE, .result_n = plan->capacity * LANES,
      .m = (block.rows + 15) / 16, .n = panels, .k = (int)depth, .adds = 0,
  };
  multiply(&factors, &scratch->prefetch);
}

/* The exponentials as a left factor with samples as rows: [panels][capacity / 32]. */
static void pack_terms_by_sample(const struct plan *plan, struct scratch *scratch, struct block block,
                                 int panels) {
  char *out = scratch->operand;
  for (int v = 0; v < panels; v++)
    for (int64_t r = 0; r < block.rows; r += DEPTH) {
      const float *at = scratch->logits + (v * plan->capacity + r) * LANES;
      char *tile = out + (v * plan->capacity + r) / DEPTH * FACTOR_TILE;
      __m512i pairs[16];
UNROLL
      for (int i = 0; i < 16; i++)
        pairs[i] = interleave(narrow_two(_mm512_load_ps(at + (2 * i + 1) * LANES),
                                         _mm512_load_ps(at + 2 * i * LANES)));
      transpose(pairs);
UNROLL
      for (int i = 0; i < 16; i++) _mm512_store_si512(tile + i * 64, pairs[i]);
    }
}

static void weighted_sum(const struct plan *plan, struct scratch *scratch, struct block block, int64_t panel,
                         int panels) {
  int64_t tiles = plan->padded_dimension / LANES;
  pack_terms_by_sample(plan, scratch, block, panels);
  struct factors factors = {
      .left = scratch->operand, .left_stride = plan->capacity / DEPTH * FACTOR_TILE,
      .right = scratch->rows_for_weighted, .right_stride = weighted_stride(plan),
      .result = scratch->result + panel * tiles * TILE, .result_m = tiles * TILE, .result_n = TILE,
      .m = panels, .n = (int)tiles, .k = (block.rows + DEPTH - 1) / DEPTH, .adds = 1,
  };
  multiply(&factors, &scratch->prefetch);
}

/* The coefficients as a left factor with class weights as rows: [rows / 16][samples / 32]. */
static void pack_coefficients_by_row(const struct plan *plan, struct scratch *scratch, struct block block,
                                     int panels) {
  char *out = scratch->operand;
  for (int v = 0; v < panels; v += 2)
    for (int64_t r = 0; r < round_up(block.rows, 16); r++) {
      const float *at = scratch->logits + (v * plan->capacity + r) * LANES;
      char *tile = out + ((r / 16) * (panels / 2) + v / 2) * FACTOR_TILE;
      __m512i both = narrow_two(_mm512_load_ps(at + plan->capacity * LANES), _mm512_load_ps(at));
      _mm512_store_si512(tile + (r % 16) * 64, both);
    }
}

static void row_gradient(const struct plan *plan, struct scratch *scratch, struct block block, int64_t panel,
                         int panels) {
  int64_t tiles = plan->padded_dimension / LANES;
  pack_coefficients_by_row(plan, scratch, block, panels);
  struct factors factors = {
      .left = scratch->operand, .left_stride = panels / 2 * FACTOR_TILE,
      .right = (char *)plan->packed_for_rows + panel / 2 * FACTOR_TILE,
      .right_stride = plan->panels / 2 * FACTOR_TILE,
      .result = scratch->result, .result_m = tiles * TILE, .result_n = TILE,
      .m = (block.rows + 15) / 16, .n = (int)tiles, .k = panels / 2, .adds = panel > 0,
  };
  multiply(&factors, &scratch->prefetch);
}

static const struct engine engine = {
    .forward_rows = FORWARD_ROWS,
    .update_rows = 64,
    .row_bytes = 2,
    .operand_bytes = 2,
    .query_bytes = 2,
    .begin = BEGIN,
    .end = END,
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
