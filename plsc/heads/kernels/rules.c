/* Backward of the normalisation, and the update formulas of the optimizers.
 *
 * All in float, in one pass over a class weight while it is in the cache. sgd, adamw and adagrad are those of
 * plsc/heads/rules.py and triton_kernels.py, with the same names.
 */
#include "pass.h"

#if defined(__AVX512F__)
#include <math.h>
#include <string.h>

#include "vector.h"

/* A row W and its gradient, factor (dw - along W / |W|) / |W|. */
struct row {
  char *weight;
  const float *result; /* the first 16 elements; the next 16 are one tile further */
  __m512 by, back;     /* g = by (dw - back W) */
  int64_t dimension;
  int is_bf16;
};

INLINE __m512 gradient_at(const struct row *row, int64_t i, __m512 w) {
  __m512 dw = _mm512_load_ps(row->result + i * TILE);
  return _mm512_mul_ps(row->by, _mm512_fnmadd_ps(row->back, w, dw));
}

static struct row open_row(const struct plan *plan, struct scratch *scratch, struct block block, int r) {
  int64_t dimension = plan->rows.dimension;
  int64_t position = row_position(plan, block.first + r);
  struct row row;
  row.is_bf16 = plan->rows.is_bf16;
  row.dimension = dimension;
  row.weight = readable_row(plan, position, scratch->decoded);
  row.result = scratch->result + (r / LANES) * (plan->padded_dimension / LANES) * TILE +
               (r % LANES) * LANES;
  float factor = plan->gradient.factor;
  row.by = _mm512_set1_ps(factor);
  row.back = _mm512_setzero_ps();
  if (plan->rows.cosine) {
    float inverse = inverse_length(row.weight, row.is_bf16, dimension);
    __m512 along = _mm512_setzero_ps();
    for (int64_t i = 0; 16 * i < dimension; i++) {
      __m512 w = load_row(row.weight, row.is_bf16, i, row_mask(i, dimension));
      __m512 unit = _mm512_mul_ps(w, _mm512_set1_ps(inverse));
      along = _mm512_fmadd_ps(unit, _mm512_load_ps(row.result + i * TILE), along);
    }
    row.by = _mm512_set1_ps(inverse * factor);
    row.back = _mm512_set1_ps(_mm512_reduce_add_ps(along) * inverse);
  }
  return row;
}

INLINE void sgd(const struct row *row, const struct plsc_rule *rule, char *state, uint32_t key,
                uint32_t state_key, int is_bf16, int state_is_bf16) {
  const __m512 lr = _mm512_set1_ps((float)rule->lr);
  const __m512 momentum = _mm512_set1_ps((float)rule->momentum);
  const __m512 decay = _mm512_set1_ps((float)rule->weight_decay);
  for (int64_t i = 0; 16 * i < row->dimension; i++) {
    __mmask16 mask = row_mask(i, row->dimension);
    __m512 w = load_row(row->weight, is_bf16, i, mask);
    __m512 g = _mm512_fmadd_ps(decay, w, gradient_at(row, i, w));
    if (state) {
      __m512 m = _mm512_fmadd_ps(momentum, load_row(state, state_is_bf16, i, mask), g);
      store_row(state, state_is_bf16, i, mask, m, state_key);
      g = rule->nesterov ? _mm512_fmadd_ps(momentum, m, g) : m;
    }
    store_row(row->weight, is_bf16, i, mask, _mm512_fnmadd_ps(lr, g, w), key);
  }
}

/* Caches 1 - beta^t, because most rows of a thread have the same t. */
struct corrections {
  int32_t steps;
  double first, second;
};

static void correct(struct corrections *corrections, const struct plsc_rule *rule, int32_t steps) {
  if (corrections->steps == steps) return;
  corrections->steps = steps;
  corrections->first = 1 - pow(rule->beta1, steps);
  corrections->second = 1 - pow(rule->beta2, steps);
}

INLINE void adamw(const struct row *row, const struct plsc_rule *rule,
                  const struct corrections *corrections, char *const *state, uint32_t key,
                  const uint32_t *state_key, int is_bf16, int first_is_bf16, int second_is_bf16) {
  const __m512 beta1 = _mm512_set1_ps((float)rule->beta1);
  const __m512 rest1 = _mm512_set1_ps((float)(1 - rule->beta1));
  const __m512 beta2 = _mm512_set1_ps((float)rule->beta2);
  const __m512 rest2 = _mm512_set1_ps((float)(1 - rule->beta2));
  const __m512 eps = _mm512_set1_ps((float)rule->eps);
  const __m512 shrink = _mm512_set1_ps((float)(1 - rule->lr * rule->weight_decay));
  const __m512 step = _mm512_set1_ps((float)(rule->lr / corrections->first));
  const __m512 second = _mm512_set1_ps((float)(1 / corrections->second));
  for (int64_t i = 0; 16 * i < row->dimension; i++) {
    __mmask16 mask = row_mask(i, row->dimension);
    __m512 w = load_row(row->weight, is_bf16, i, mask);
    __m512 g = gradient_at(row, i, w);
    __m512 m = _mm512_mul_ps(beta1, load_row(state[0], first_is_bf16, i, mask));
    m = _mm512_fmadd_ps(rest1, g, m);
    __m512 v = _mm512_mul_ps(beta2, load_row(state[1], second_is_bf16, i, mask));
    v = _mm512_fmadd_ps(rest2, _mm512_mul_ps(g, g), v);
    store_row(state[0], first_is_bf16, i, mask, m, state_key[0]);
    store_row(state[1], second_is_bf16, i, mask, v, state_key[1]);
    __m512 denominator = _mm512_add_ps(_mm512_sqrt_ps(_mm512_mul_ps(v, second)), eps);
    w = _mm512_mul_ps(w, shrink);
    w = _mm512_fnmadd_ps(step, _mm512_div_ps(m, denominator), w);
    store_row(row->weight, is_bf16, i, mask, w, key);
  }
}

/* One value per row; it uses column 0 of the noise. */
static float read_number(const void *at, int is_bf16) {
  if (!is_bf16) return *(const float *)at;
  uint32_t bits = (uint32_t)*(const uint16_t *)at << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static void write_number(void *at, int is_bf16, float x, uint32_t row_key) {
  if (!is_bf16) {
    *(float *)at = x;
    return;
  }
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (x != x)
    bits |= 0x400000;
  else if ((bits & 0x7f800000) != 0x7f800000)
    bits += mix_number(row_key) >> 16;
  *(uint16_t *)at = (uint16_t)(bits >> 16);
}

static void adagrad(const struct row *row, const struct plsc_rule *rule, char *state, uint32_t key,
                    uint32_t state_key) {
  const __m512 decay = _mm512_set1_ps((float)rule->weight_decay);
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; 16 * i < row->dimension; i++) {
    __mmask16 mask = row_mask(i, row->dimension);
    __m512 w = load_row(row->weight, row->is_bf16, i, mask);
    __m512 g = _mm512_fmadd_ps(decay, w, gradient_at(row, i, w));
    squares = _mm512_mask3_fmadd_ps(g, g, squares, mask);
  }
  float h = read_number(state, rule->state_is_bf16[0]);
  h += _mm512_reduce_add_ps(squares) / (float)row->dimension;
  write_number(state, rule->state_is_bf16[0], h, state_key);
  const __m512 step = _mm512_set1_ps((float)(rule->lr / (sqrt(h) + rule->eps)));
  for (int64_t i = 0; 16 * i < row->dimension; i++) {
    __mmask16 mask = row_mask(i, row->dimension);
    __m512 w = load_row(row->weight, row->is_bf16, i, mask);
    __m512 g = _mm512_fmadd_ps(decay, w, gradient_at(row, i, w));
    store_row(row->weight, row->is_bf16, i, mask, _mm512_fnmadd_ps(step, g, w), key);
  }
}

static void write_gradient(const struct row *row, float *out) {
  for (int64_t i = 0; 16 * i < row->dimension; i++) {
    __mmask16 mask = row_mask(i, row->dimension);
    __m512 w = load_row(row->weight, row->is_bf16, i, mask);
    _mm512_mask_storeu_ps(out + 16 * i, mask, gradient_at(row, i, w));
  }
}

static char *state_of(const struct plan *plan, int which, int64_t position, int64_t width) {
  const struct plsc_rule *rule = &plan->rule;
  if (!rule->state[which]) return 0;
  return (char *)rule->state[which] + position * width * (rule->state_is_bf16[which] ? 2 : 4);
}

/* The loops are compiled once per combination of types. */
static void apply(const struct plan *plan, const struct row *row, int64_t position, int64_t number,
                  struct corrections *corrections) {
  const struct plsc_rule *rule = &plan->rule;
  int64_t dimension = plan->rows.dimension;
  uint32_t key = noise_key(number, rule->key);
  uint32_t state_key[2] = {noise_key(number, rule->key + 1), noise_key(number, rule->key + 2)};
  int b0 = rule->state_is_bf16[0], b1 = rule->state_is_bf16[1];
  char *state[2];
  if (rule->kind == PLSC_SGD) {
    state[0] = state_of(plan, 0, position, dimension);
    if (row->is_bf16 && b0)
      sgd(row, rule, state[0], key, state_key[0], 1, 1);
    else if (row->is_bf16)
      sgd(row, rule, state[0], key, state_key[0], 1, 0);
    else if (b0)
      sgd(row, rule, state[0], key, state_key[0], 0, 1);
    else
      sgd(row, rule, state[0], key, state_key[0], 0, 0);
  } else if (rule->kind == PLSC_ADAMW) {
    correct(corrections, rule, ++rule->steps[position]);
    state[0] = state_of(plan, 0, position, dimension);
    state[1] = state_of(plan, 1, position, dimension);
    if (!row->is_bf16 && !b0 && !b1)
      adamw(row, rule, corrections, state, key, state_key, 0, 0, 0);
    else
      adamw(row, rule, corrections, state, key, state_key, row->is_bf16, b0, b1);
  } else {
    adagrad(row, rule, state_of(plan, 0, position, 1), key, state_key[0]);
  }
}

void plsc_finish_rows(const struct plan *plan, struct scratch *scratch, struct block block) {
  struct corrections corrections = {-1, 0, 0};
  for (int r = 0; r < block.rows; r++) {
    int64_t place = block.first + r;
    struct row row = open_row(plan, scratch, block, r);
    if (plan->rule.kind == PLSC_NO_RULE) {
      write_gradient(&row, plan->out + (place - plan->begin) * plan->rows.dimension);
    } else {
      int64_t number = plan->rows.number ? plan->rows.number[place] : place;
      int64_t position = row_position(plan, place);
      number += plan->rows.first_row;
      apply(plan, &row, position, number, &corrections);
      if (plan->rows.is_coded)
        encode_row(stored_row(plan, position), scratch->decoded, plan->rows.dimension,
                   noise_key(number, plan->rule.key));
    }
    if (plan->bias_out) {
      __m512 sums = _mm512_load_ps(scratch->bias_sums + r * LANES);
      plan->bias_out[place - plan->begin] = _mm512_reduce_add_ps(sums) * plan->gradient.factor;
    }
  }
}
#endif
