/* Backward of the normalisation, and the update formulas of the optimizers.
 *
 * All in float, in one pass over a class weight while it is in the cache. sgd, adamw and adagrad are those of
 * plsc/heads/weights.py and triton_kernels.py, with the same names.
 */
#include <math.h>

#include "vector.h"

/* A row W and its gradient, factor (dw - along W / |W|) / |W|. */
struct row {
  char *weight;
  const float *result; /* as in_tiles */
  vec by, back;        /* g = by (dw - back W) */
  int64_t dimension;
  int is_bf16;
};

INLINE vec gradient_at(const struct row *row, int64_t d, vec w) {
  return row->by * (load(row->result + in_tiles(d)) - row->back * w);
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
  row.by = all(factor);
  row.back = (vec){0};
  if (plan->rows.cosine) {
    float inverse = inverse_length(row.weight, row.is_bf16, dimension);
    vec along = {0};
    for (int64_t d = 0; d < dimension; d += WIDTH) {
      vec w = load_row(row.weight, row.is_bf16, d, dimension);
      along += w * inverse * load(row.result + in_tiles(d));
    }
    row.by = all(inverse * factor);
    row.back = all(sum_of(along) * inverse);
  }
  return row;
}

INLINE void sgd(const struct row *row, const struct plsc_rule *rule, char *state, uint32_t key,
                uint32_t state_key, int is_bf16, int state_is_bf16) {
  const float lr = (float)rule->lr;
  const float momentum = (float)rule->momentum;
  const float decay = (float)rule->weight_decay;
  for (int64_t d = 0; d < row->dimension; d += WIDTH) {
    vec w = load_row(row->weight, is_bf16, d, row->dimension);
    vec g = decay * w + gradient_at(row, d, w);
    if (state) {
      vec m = momentum * load_row(state, state_is_bf16, d, row->dimension) + g;
      store_row(state, state_is_bf16, d, row->dimension, m, state_key);
      g = rule->nesterov ? momentum * m + g : m;
    }
    store_row(row->weight, is_bf16, d, row->dimension, w - lr * g, key);
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
  const float beta1 = (float)rule->beta1;
  const float rest1 = (float)(1 - rule->beta1);
  const float beta2 = (float)rule->beta2;
  const float rest2 = (float)(1 - rule->beta2);
  const float eps = (float)rule->eps;
  const float shrink = (float)(1 - rule->lr * rule->weight_decay);
  const float step = (float)(rule->lr / corrections->first);
  const float second = (float)(1 / corrections->second);
  for (int64_t d = 0; d < row->dimension; d += WIDTH) {
    vec w = load_row(row->weight, is_bf16, d, row->dimension);
    vec g = gradient_at(row, d, w);
    vec m = load_row(state[0], first_is_bf16, d, row->dimension);
    vec v = load_row(state[1], second_is_bf16, d, row->dimension);
    m = rest1 * g + beta1 * m;
    v = rest2 * (g * g) + beta2 * v;
    store_row(state[0], first_is_bf16, d, row->dimension, m, state_key[0]);
    store_row(state[1], second_is_bf16, d, row->dimension, v, state_key[1]);
    vec change = step * (m / (SQUARE_ROOTS(v * second) + eps));
    w = w * shrink - change;
    store_row(row->weight, is_bf16, d, row->dimension, w, key);
  }
}

static void adagrad(const struct row *row, const struct plsc_rule *rule, char *state, uint32_t key,
                    uint32_t state_key) {
  const float decay = (float)rule->weight_decay;
  vec squares = {0};
  for (int64_t d = 0; d < row->dimension; d += WIDTH) {
    vec w = load_row(row->weight, row->is_bf16, d, row->dimension);
    vec g = decay * w + gradient_at(row, d, w);
    squares += g * g;
  }
  /* One value per row; it uses column 0 of the noise. */
  float h = read_number(state, rule->state_is_bf16[0]) + sum_of(squares) / (float)row->dimension;
  store_row(state, rule->state_is_bf16[0], 0, 1, all(h), state_key);
  const float step = (float)(rule->lr / (sqrt(h) + rule->eps));
  for (int64_t d = 0; d < row->dimension; d += WIDTH) {
    vec w = load_row(row->weight, row->is_bf16, d, row->dimension);
    vec g = decay * w + gradient_at(row, d, w);
    store_row(row->weight, row->is_bf16, d, row->dimension, w - step * g, key);
  }
}

static void write_gradient(const struct row *row, float *out) {
  for (int64_t d = 0; d < row->dimension; d += WIDTH) {
    vec w = load_row(row->weight, row->is_bf16, d, row->dimension);
    store_row(out, 0, d, row->dimension, gradient_at(row, d, w), 0);
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

static void finish_rows(const struct plan *plan, struct scratch *scratch, struct block block) {
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
      float sum = 0;
      for (int i = 0; i < LANES; i += WIDTH) sum += sum_of(load(scratch->bias_sums + r * LANES + i));
      plan->bias_out[place - plan->begin] = sum * plan->gradient.factor;
    }
  }
}
