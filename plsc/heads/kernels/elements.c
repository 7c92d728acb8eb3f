/* Element-wise operations on logits: exponentials, sums, masks, gradient coefficients. */
#include "pass.h"

#if defined(__AVX512F__)
#include "vector.h"

#define MINUS_INFINITY (-__builtin_inff())

/* Constants of a vector of 16 samples. In a block, row r belongs to class r / K. */
struct lanes {
  __m512 shift, threshold, scale, hard_factor;
  __m512i target_class;
};

INLINE struct lanes load_lanes(const struct plan *plan, int64_t panel, const float *shift) {
  struct lanes lanes;
  lanes.shift = _mm512_loadu_ps(shift + panel * LANES);
  lanes.threshold = _mm512_loadu_ps(plan->threshold + panel * LANES);
  lanes.scale = _mm512_set1_ps(plan->queries.scale);
  lanes.hard_factor = _mm512_set1_ps(plan->queries.hard_factor);
  lanes.target_class = _mm512_loadu_si512(plan->target_class + panel * LANES);
  return lanes;
}

/* z of c: s c, and s c (t + c) above the threshold. */
INLINE __m512 logit(const struct lanes *lanes, __m512 c, int has_hard) {
  __m512 z = _mm512_mul_ps(c, lanes->scale);
  if (!has_hard) return z;
  __mmask16 hard = _mm512_cmp_ps_mask(c, lanes->threshold, _CMP_GT_OQ);
  return _mm512_mask_mul_ps(z, hard, z, _mm512_add_ps(c, lanes->hard_factor));
}

/* dz / dc / s. */
INLINE __m512 slope(const struct lanes *lanes, __m512 c) {
  __mmask16 hard = _mm512_cmp_ps_mask(c, lanes->threshold, _CMP_GT_OQ);
  __m512 steep = _mm512_fmadd_ps(_mm512_set1_ps(2.0f), c, lanes->hard_factor);
  return _mm512_mask_blend_ps(hard, _mm512_set1_ps(1.0f), steep);
}

/* Adds the bias of each row. */
static void add_bias(const struct plan *plan, struct block block, float *panel) {
  for (int r = 0; r < block.rows; r++) {
    __m512 bias = _mm512_set1_ps(plan->rows.bias[row_position(plan, block.first + r)]);
    float *at = panel + r * LANES;
    _mm512_store_ps(at, _mm512_add_ps(_mm512_load_ps(at), bias));
  }
}

/* Keeps the highest row of each class, sets the others to -inf. The first wins a tie; NaN is highest. */
static void keep_winners(float *panel, int rows, int centers) {
  for (int start = 0; start < rows; start += centers) {
    float *at = panel + start * LANES;
    __m512 best = _mm512_load_ps(at);
    __m512i winner = _mm512_setzero_si512();
    for (int k = 1; k < centers; k++) {
      __m512 c = _mm512_load_ps(at + k * LANES);
      __mmask16 better = _mm512_cmp_ps_mask(c, best, _CMP_NLE_UQ);
      better &= _mm512_cmp_ps_mask(best, best, _CMP_ORD_Q);
      best = _mm512_mask_mov_ps(best, better, c);
      winner = _mm512_mask_mov_epi32(winner, better, _mm512_set1_epi32(k));
    }
    for (int k = 0; k < centers; k++) {
      __mmask16 wins = _mm512_cmpeq_epi32_mask(winner, _mm512_set1_epi32(k));
      _mm512_store_ps(at + k * LANES, _mm512_mask_mov_ps(_mm512_set1_ps(MINUS_INFINITY), wins, best));
    }
  }
}

/* Multiplies the sums so far of the samples of a panel. */
static void rescale_weighted(const struct plan *plan, struct scratch *scratch, int64_t panel, __m512 by,
                          __mmask16 which) {
  float factors[LANES];
  _mm512_storeu_ps(factors, by);
  int64_t tiles = plan->padded_dimension / LANES;
  float *tile = scratch->result + panel * tiles * TILE;
  for (int64_t i = 0; i < tiles; i++, tile += TILE)
    for (int sample = 0; sample < LANES; sample++)
      if (which >> sample & 1) {
        float *at = tile + sample * LANES;
        _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(factors[sample])));
      }
}

/* Raises the running maximum of a panel's samples, and rescales their sums. */
static void raise_maximum(const struct plan *plan, struct scratch *scratch, struct block block,
                          int64_t panel, const float *at, int has_hard) {
  float *maximum = scratch->maximum + panel * LANES;
  struct lanes lanes = load_lanes(plan, panel, scratch->maximum);
  __m512 highest = lanes.shift;
  int centers = (int)plan->rows.centers;
  int64_t class = block.first / centers;
  for (int start = 0; start < block.rows; start += centers, class++) {
    __m512i this_class = _mm512_set1_epi32((int)class);
    __mmask16 other = _mm512_cmpneq_epi32_mask(lanes.target_class, this_class);
    for (int r = start; r < start + centers; r++) {
      __m512 z = logit(&lanes, _mm512_load_ps(at + r * LANES), has_hard);
      highest = _mm512_mask_max_ps(highest, other, z, highest);
    }
  }
  __mmask16 raised = _mm512_cmp_ps_mask(highest, lanes.shift, _CMP_NEQ_UQ);
  if (!raised) return;
  _mm512_storeu_ps(maximum, highest);
  __mmask16 summed = _mm512_cmp_ps_mask(lanes.shift, _mm512_set1_ps(MINUS_INFINITY), _CMP_GT_OQ);
  raised &= summed;
  if (!raised) return;
  __m512 by = exp_vector(_mm512_sub_ps(lanes.shift, highest));
  by = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), raised, by);
  double *total = scratch->total + panel * LANES;
  __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(by));
  __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(by, 1));
  _mm512_storeu_pd(total, _mm512_mul_pd(_mm512_loadu_pd(total), low));
  _mm512_storeu_pd(total + 8, _mm512_mul_pd(_mm512_loadu_pd(total + 8), high));
  if (plan->want_weighted) rescale_weighted(plan, scratch, panel, by, raised);
}

/* Replaces products by exp(z - shift) slope, and adds the sums of exp(z - shift) to the totals. */
INLINE void exponentials(const struct plan *plan, struct scratch *scratch, struct block block,
                         int64_t panel, float *at, int has_hard, int keeps) {
  const float *shift = plan->fixed ? plan->shift : scratch->maximum;
  struct lanes lanes = load_lanes(plan, panel, shift);
  /* A sample without any class other than its label has no maximum to subtract. */
  __mmask16 finite = _mm512_cmp_ps_mask(lanes.shift, _mm512_set1_ps(MINUS_INFINITY), _CMP_NEQ_UQ);
  lanes.shift = _mm512_maskz_mov_ps(finite, lanes.shift);
  uint16_t *kept = keeps ? plan->kept + (panel * plan->rows.count + block.first) * LANES : 0;
  __m512 sum = _mm512_setzero_ps();
  int centers = (int)plan->rows.centers;
  int64_t class = block.first / centers;
  for (int start = 0; start < block.rows; start += centers, class++) {
    __m512i this_class = _mm512_set1_epi32((int)class);
    __mmask16 other = _mm512_cmpneq_epi32_mask(lanes.target_class, this_class);
    for (int r = start; r < start + centers; r++) {
      __m512 c = _mm512_load_ps(at + r * LANES);
      __m512 z = has_hard ? _mm512_sub_ps(logit(&lanes, c, 1), lanes.shift)
                          : _mm512_fmsub_ps(c, lanes.scale, lanes.shift);
      __m512 p = _mm512_maskz_mov_ps(other, exp_vector(z));
      sum = _mm512_add_ps(sum, p);
      /* A losing sub-centre has c = -inf and p = 0; it is never hard. */
      if (has_hard) p = _mm512_mul_ps(p, slope(&lanes, c));
      _mm512_store_ps(at + r * LANES, p);
      if (keeps) _mm256_storeu_si256((__m256i *)(kept + r * LANES), narrow_bf16(p));
    }
  }
  double *total = scratch->total + panel * LANES;
  __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(sum));
  __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(sum, 1));
  _mm512_storeu_pd(total, _mm512_add_pd(_mm512_loadu_pd(total), low));
  _mm512_storeu_pd(total + 8, _mm512_add_pd(_mm512_loadu_pd(total + 8), high));
}

static void clear_padding(struct block block, float *at) {
  int64_t padded = round_up(block.rows, 32);
  for (int64_t r = block.rows; r < padded; r++)
    _mm512_store_ps(at + r * LANES, _mm512_setzero_ps());
}

/* Adds biases and selects sub-centres. */
static void prepare(const struct plan *plan, struct block block, float *at) {
  if (plan->rows.bias) add_bias(plan, block, at);
  if (plan->rows.centers > 1) keep_winners(at, block.rows, (int)plan->rows.centers);
}

void plsc_exponentials(const struct plan *plan, struct scratch *scratch, struct block block,
                       int64_t panel, int panels) {
  int has_hard = plan->queries.threshold != 0;
  for (int i = 0; i < panels; i++, panel++) {
    float *at = scratch->logits + i * plan->capacity * LANES;
    prepare(plan, block, at);
    if (!plan->fixed) raise_maximum(plan, scratch, block, panel, at, has_hard);
    if (has_hard)
      exponentials(plan, scratch, block, panel, at, 1, plan->kept != 0);
    else if (plan->kept)
      exponentials(plan, scratch, block, panel, at, 0, 1);
    else
      exponentials(plan, scratch, block, panel, at, 0, 0);
    clear_padding(block, at);
  }
}

/* Replaces products, or kept exponentials, by weight_i G_ij. */
INLINE void coefficients(const struct plan *plan, struct scratch *scratch, struct block block,
                         int64_t panel, float *at, int has_hard, int has_kept) {
  struct lanes lanes = load_lanes(plan, panel, plan->shift); /* log of the sum over all classes */
  __m512 factor = _mm512_loadu_ps(plan->factor + panel * LANES);
  __m512 weight = _mm512_loadu_ps(plan->weight + panel * LANES);
  __m512i target_row = _mm512_loadu_si512(plan->target_row + panel * LANES);
  __m512 coefficient = _mm512_loadu_ps(plan->coefficient + panel * LANES);
  const uint16_t *kept =
      has_kept ? plan->gradient.kept + (panel * plan->rows.count + block.first) * LANES : 0;
  int centers = (int)plan->rows.centers;
  int64_t class = block.first / centers;
  for (int start = 0; start < block.rows; start += centers, class++) {
    __m512i this_class = _mm512_set1_epi32((int)class);
    __mmask16 other = _mm512_cmpneq_epi32_mask(lanes.target_class, this_class);
    for (int r = start; r < start + centers; r++) {
      __m512 g;
      if (has_kept) {
        g = widen_bf16(_mm256_loadu_si256((const __m256i *)(kept + r * LANES)));
        g = _mm512_mul_ps(g, factor);
      } else {
        __m512 c = _mm512_load_ps(at + r * LANES);
        __m512 z = has_hard ? _mm512_sub_ps(logit(&lanes, c, 1), lanes.shift)
                            : _mm512_fmsub_ps(c, lanes.scale, lanes.shift);
        g = exp_vector(z);
        if (has_hard) g = _mm512_mul_ps(g, slope(&lanes, c));
      }
      g = _mm512_maskz_mov_ps(other, g);
      __m512i row = _mm512_set1_epi32((int)(block.first + r));
      g = _mm512_mask_mov_ps(g, _mm512_cmpeq_epi32_mask(target_row, row), coefficient);
      g = _mm512_mul_ps(g, weight);
      _mm512_store_ps(at + r * LANES, g);
      if (scratch->bias_sums) {
        float *sums = scratch->bias_sums + r * LANES;
        _mm512_store_ps(sums, _mm512_add_ps(_mm512_load_ps(sums), g));
      }
    }
  }
}

void plsc_coefficients(const struct plan *plan, struct scratch *scratch, struct block block,
                       int64_t panel, int panels) {
  int has_hard = plan->queries.threshold != 0, has_kept = plan->gradient.kept != 0;
  for (int i = 0; i < panels; i++, panel++) {
    float *at = scratch->logits + i * plan->capacity * LANES;
    if (!has_kept) prepare(plan, block, at);
    if (has_kept)
      coefficients(plan, scratch, block, panel, at, 0, 1);
    else if (has_hard)
      coefficients(plan, scratch, block, panel, at, 1, 0);
    else
      coefficients(plan, scratch, block, panel, at, 0, 0);
    clear_padding(block, at);
  }
}

/* Adds the sums of all threads, in thread order, for the samples of a panel. */
void plsc_reduce_panel(const struct plan *plan, int64_t panel) {
  int64_t first = panel * LANES, dimension = plan->rows.dimension;
  int64_t samples = plan->queries.count - first < LANES ? plan->queries.count - first : LANES;
  int64_t tiles = plan->padded_dimension / LANES;
  for (int64_t b = first; b < first + samples; b++) {
    float highest = MINUS_INFINITY;
    for (int t = 0; t < plan->threads && !plan->fixed; t++) {
      float mine = plan->scratch[t].maximum[b];
      if (!(mine <= highest)) highest = mine;
    }
    double total = 0;
    int is_first = 1;
    for (int t = 0; t < plan->threads; t++) {
      const struct scratch *scratch = &plan->scratch[t];
      float by = 1;
      if (!plan->fixed) {
        if (scratch->maximum[b] == MINUS_INFINITY) continue; /* no class but the label in this thread */
        by = _mm512_cvtss_f32(exp_vector(_mm512_set1_ps(scratch->maximum[b] - highest)));
      }
      total += scratch->total[b] * by;
      if (!plan->want_weighted) continue;
      const float *tile = scratch->result + (panel * tiles * LANES + (b - first)) * LANES;
      for (int64_t i = 0; i < (dimension + 15) / 16; i++) {
        __mmask16 mask = row_mask(i, dimension);
        float *out = plan->weighted_out + b * dimension + 16 * i;
        __m512 x = _mm512_mul_ps(_mm512_load_ps(tile + i * TILE), _mm512_set1_ps(by));
        if (!is_first) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, out));
        _mm512_mask_storeu_ps(out, mask, x);
      }
      is_first = 0;
    }
    if (is_first && plan->want_weighted)
      for (int64_t d = 0; d < dimension; d++) plan->weighted_out[b * dimension + d] = 0;
    plan->total_out[b] = (float)total;
    if (!plan->fixed) plan->shift_out[b] = highest;
  }
}
#endif
