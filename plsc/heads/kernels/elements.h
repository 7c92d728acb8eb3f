/* Element-wise operations on logits: exponentials, sums, masks, gradient coefficients. */
#include "vector.h"

/* The class of the next row of a block: K rows per class. */
struct class {
  int32_t number, centers, row;
};

INLINE struct class class_of(const struct plan *plan, struct block block) {
  int64_t centers = plan->rows.centers;
  return (struct class){(int32_t)(block.first / centers), (int32_t)centers, 0};
}

INLINE int32_t next_row(struct class *class) {
  int32_t number = class->number;
  if (++class->row == class->centers) class->row = 0, class->number++;
  return number;
}

/* Constants of WIDTH samples, from `first` on. */
struct lanes {
  vec shift, threshold;
  ivec target_class;
  float scale, hard_factor;
};

INLINE struct lanes load_lanes(const struct plan *plan, int64_t first, const float *shift) {
  struct lanes lanes;
  lanes.shift = load(shift + first);
  lanes.threshold = load(plan->threshold + first);
  lanes.target_class = load_integers(plan->target_class + first);
  lanes.scale = plan->queries.scale;
  lanes.hard_factor = plan->queries.hard_factor;
  return lanes;
}

/* z of c: s c, and s c (t + c) above the threshold. */
INLINE vec logit(const struct lanes *lanes, vec c, int has_hard) {
  vec z = c * lanes->scale;
  return has_hard ? choose(c > lanes->threshold, z * (c + lanes->hard_factor), z) : z;
}

/* dz / dc / s. */
INLINE vec slope(const struct lanes *lanes, vec c) {
  return choose(c > lanes->threshold, 2.0f * c + lanes->hard_factor, all(1.0f));
}

/* Adds the bias of each row. */
static void add_bias(const struct plan *plan, struct block block, float *at) {
  for (int r = 0; r < block.rows; r++) {
    float bias = plan->rows.bias[row_position(plan, block.first + r)];
    for (int i = 0; i < LANES; i++) at[r * LANES + i] += bias;
  }
}

/* Keeps the highest row of each class, sets the others to -inf. The first wins a tie; NaN is highest. */
static void keep_winners(float *at, int rows, int centers) {
  for (int start = 0; start < rows; start += centers, at += centers * LANES) {
    vec best = load(at);
    ivec winner = {0};
    for (int k = 1; k < centers; k++) {
      vec c = load(at + k * LANES);
      ivec better = ~(c <= best) & (best == best);
      best = choose(better, c, best);
      winner = (winner & ~better) | (k & better);
    }
    for (int k = 0; k < centers; k++) store(at + k * LANES, choose(winner == k, best, all(MINUS_INFINITY)));
  }
}

/* Multiplies the sums so far of WIDTH samples. */
static void rescale_weighted(const struct plan *plan, struct scratch *scratch, int64_t first, vec by) {
  int64_t dimension = plan->padded_dimension;
  float *at = scratch->result + first / LANES * dimension * LANES + first % LANES * LANES;
  for (int sample = 0; sample < WIDTH; sample++, at += LANES)
    if (by[sample] != 1)
      for (int64_t d = 0; d < dimension; d += WIDTH) store(at + in_tiles(d), load(at + in_tiles(d)) * by[sample]);
}

/* Raises the running maximum of WIDTH samples, and rescales their sums. */
static void raise_maximum(const struct plan *plan, struct scratch *scratch, struct block block,
                          int64_t first, const float *at, int has_hard) {
  struct lanes lanes = load_lanes(plan, first, scratch->maximum);
  vec highest = lanes.shift;
  struct class class = class_of(plan, block);
  for (int r = 0; r < block.rows; r++) {
    vec z = logit(&lanes, load(at + r * LANES), has_hard);
    highest = choose((lanes.target_class != next_row(&class)) & (z > highest), z, highest);
  }
  ivec raised = ~(highest == lanes.shift);
  if (!any(raised)) return;
  store(scratch->maximum + first, highest);
  raised &= lanes.shift > MINUS_INFINITY;
  if (!any(raised)) return;
  vec by = choose(raised, exp_vector(lanes.shift - highest), all(1.0f));
  for (int i = 0; i < WIDTH; i++) scratch->total[first + i] *= by[i];
  if (plan->want_weighted) rescale_weighted(plan, scratch, first, by);
}

/* Replaces products by exp(z - shift) slope, and adds the sums of exp(z - shift) to the totals. */
INLINE void exponentials_of(const struct plan *plan, struct scratch *scratch, struct block block,
                            int64_t first, float *at, int has_hard, int keeps) {
  struct lanes lanes = load_lanes(plan, first, plan->fixed ? plan->shift : scratch->maximum);
  /* A sample without any class other than its label has no maximum to subtract. */
  lanes.shift = where(lanes.shift != MINUS_INFINITY, lanes.shift);
  uint16_t *kept =
      keeps ? plan->kept + (first / LANES * plan->rows.count + block.first) * LANES + first % LANES : 0;
  vec sum = {0};
  struct class class = class_of(plan, block);
  for (int r = 0; r < block.rows; r++) {
    vec c = load(at + r * LANES);
    ivec other = lanes.target_class != next_row(&class);
    vec p = where(other, exp_vector(logit(&lanes, c, has_hard) - lanes.shift));
    sum += p;
    /* A losing sub-centre has c = -inf and p = 0; it is never hard. */
    if (has_hard) p *= slope(&lanes, c);
    store(at + r * LANES, p);
    if (!keeps) continue;
    halves narrow = narrow_bf16(p);
    memcpy(kept + r * LANES, &narrow, sizeof narrow);
  }
  for (int i = 0; i < WIDTH; i++) scratch->total[first + i] += sum[i];
}

static void clear_padding(struct block block, float *at) {
  for (int64_t i = block.rows * LANES; i < round_up(block.rows, 32) * LANES; i++) at[i] = 0;
}

/* Adds biases and selects sub-centres. */
static void prepare(const struct plan *plan, struct block block, float *at) {
  if (plan->rows.bias) add_bias(plan, block, at);
  for (int i = 0; plan->rows.centers > 1 && i < LANES; i += WIDTH)
    keep_winners(at + i, block.rows, (int)plan->rows.centers);
}

static void exponentials(const struct plan *plan, struct scratch *scratch, struct block block, int64_t panel,
                         int panels) {
  int has_hard = plan->queries.threshold != 0;
  for (int i = 0; i < panels; i++) {
    float *at = scratch->logits + i * plan->capacity * LANES;
    prepare(plan, block, at);
    for (int lane = 0; lane < LANES; lane += WIDTH) {
      int64_t first = (panel + i) * LANES + lane;
      if (!plan->fixed) raise_maximum(plan, scratch, block, first, at + lane, has_hard);
      if (has_hard)
        exponentials_of(plan, scratch, block, first, at + lane, 1, plan->kept != 0);
      else if (plan->kept)
        exponentials_of(plan, scratch, block, first, at + lane, 0, 1);
      else
        exponentials_of(plan, scratch, block, first, at + lane, 0, 0);
    }
    clear_padding(block, at);
  }
}

/* Replaces products, or kept exponentials, by weight_i G_ij. */
INLINE void coefficients_of(const struct plan *plan, struct scratch *scratch, struct block block,
                            int64_t first, float *at, int has_hard, int has_kept) {
  struct lanes lanes = load_lanes(plan, first, plan->shift); /* log of the sum over all classes */
  vec factor = load(plan->factor + first), weight = load(plan->weight + first);
  float *sums = scratch->bias_sums ? scratch->bias_sums + first % LANES : 0;
  const uint16_t *kept = plan->gradient.kept;
  if (has_kept) kept += (first / LANES * plan->rows.count + block.first) * LANES + first % LANES;
  struct class class = class_of(plan, block);
  for (int r = 0; r < block.rows; r++) {
    vec g;
    if (has_kept) {
      halves narrow;
      memcpy(&narrow, kept + r * LANES, sizeof narrow);
      g = widen_bf16(narrow) * factor;
    } else {
      vec c = load(at + r * LANES);
      g = exp_vector(logit(&lanes, c, has_hard) - lanes.shift);
      if (has_hard) g *= slope(&lanes, c);
    }
    g = where(lanes.target_class != next_row(&class), g) * weight;
    store(at + r * LANES, g);
    if (sums) store(sums + r * LANES, load(sums + r * LANES) + g);
  }
  for (int i = 0; i < WIDTH; i++) {
    int64_t r = plan->target_row[first + i] - block.first;
    if (r < 0 || r >= block.rows) continue;
    at[r * LANES + i] = plan->coefficient[first + i] * weight[i];
    if (sums) sums[r * LANES + i] += at[r * LANES + i];
  }
}

static void coefficients(const struct plan *plan, struct scratch *scratch, struct block block, int64_t panel,
                         int panels) {
  int has_hard = plan->queries.threshold != 0, has_kept = plan->gradient.kept != 0;
  for (int i = 0; i < panels; i++) {
    float *at = scratch->logits + i * plan->capacity * LANES;
    if (!has_kept) prepare(plan, block, at);
    for (int lane = 0; lane < LANES; lane += WIDTH) {
      int64_t first = (panel + i) * LANES + lane;
      if (has_kept)
        coefficients_of(plan, scratch, block, first, at + lane, 0, 1);
      else if (has_hard)
        coefficients_of(plan, scratch, block, first, at + lane, 1, 0);
      else
        coefficients_of(plan, scratch, block, first, at + lane, 0, 0);
    }
    clear_padding(block, at);
  }
}

/* Adds the sums of all threads, in thread order, for the samples of a panel. */
static void reduce_panel(const struct plan *plan, int64_t panel) {
  int64_t first = panel * LANES, dimension = plan->rows.dimension;
  int64_t samples = plan->queries.count - first < LANES ? plan->queries.count - first : LANES;
  for (int64_t b = first; b < first + samples; b++) {
    float highest = MINUS_INFINITY;
    for (int t = 0; t < plan->threads && !plan->fixed; t++) {
      float mine = plan->scratch[t].maximum[b];
      if (!(mine <= highest)) highest = mine;
    }
    double total = 0;
    float *out = plan->want_weighted ? plan->weighted_out + b * dimension : 0;
    if (out) memset(out, 0, (size_t)dimension * sizeof *out);
    for (int t = 0; t < plan->threads; t++) {
      const struct scratch *scratch = &plan->scratch[t];
      float by = 1;
      if (!plan->fixed) {
        if (scratch->maximum[b] == MINUS_INFINITY) continue; /* no class but the label in this thread */
        by = exp_vector(all(scratch->maximum[b] - highest))[0];
      }
      total += scratch->total[b] * by;
      if (!out) continue;
      const float *at = scratch->result + panel * plan->padded_dimension * LANES + (b - first) * LANES;
      for (int64_t d = 0; d < dimension; d += WIDTH) {
        vec x = load_row(out, 0, d, dimension) + load(at + in_tiles(d)) * by;
        STORE_SOME(out + d, x, dimension - d);
      }
    }
    plan->total_out[b] = (float)total;
    if (!plan->fixed) plan->shift_out[b] = highest;
  }
}
