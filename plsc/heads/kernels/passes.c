/* The entry points plsc_forward and plsc_update: memory allocation, and how threads iterate over the rows. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "pass.h"

#define ALIGNMENT ((size_t)1 << 21) /* huge pages, if available */

/* One allocation that is divided into pieces: the first run only adds up the sizes. */
struct arena {
  char *base;
  size_t used;
};

static void *take(struct arena *arena, size_t bytes) {
  void *at = arena->base ? arena->base + arena->used : 0;
  arena->used += (bytes + 255) / 256 * 256;
  return at;
}

static int64_t chunk_panels(const struct plan *plan) {
  int64_t most = CHUNK / LANES;
  return plan->panels < most ? plan->panels : most;
}

static void take_shared(struct plan *plan, struct arena *arena) {
  size_t batch = (size_t)plan->panels * LANES, dimension = (size_t)plan->padded_dimension;
  float **numbers[] = {&plan->shift, &plan->threshold, &plan->weight, &plan->coefficient, &plan->factor};
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
    *numbers[i] = take(arena, batch * sizeof(float));
  plan->target_class = take(arena, batch * sizeof(int32_t));
  plan->target_row = take(arena, batch * sizeof(int32_t));
  plan->packed = take(arena, batch * dimension * plan->engine->query_bytes);
  plan->packed_for_rows = plan->is_update ? take(arena, batch * dimension * plan->engine->query_bytes) : 0;
  plan->scratch = take(arena, (size_t)plan->threads * sizeof *plan->scratch);
}

static void take_scratch(const struct plan *plan, struct scratch *scratch, struct arena *arena) {
  size_t capacity = (size_t)plan->capacity, dimension = (size_t)plan->padded_dimension;
  size_t batch = (size_t)plan->panels * LANES, chunk = (size_t)chunk_panels(plan) * LANES;
  size_t rows = capacity * (dimension + LANES) * plan->engine->row_bytes;
  struct scratch mine;
  memset(&mine, 0, sizeof mine);
  mine.logits = take(arena, chunk * capacity * sizeof(float));
  mine.rows = take(arena, rows);
  size_t lines = dimension / LANES * 64; /* of weighted_stride in bf16.c */
  mine.rows_for_weighted = take(arena, plan->want_weighted ? rows + lines : 0);
  mine.decoded = take(arena, plan->rows.is_coded ? 2 * dimension * sizeof(float) : 0);
  mine.operand = take(arena, chunk * capacity * plan->engine->operand_bytes);
  if (plan->is_update) {
    mine.result = take(arena, capacity * dimension * sizeof(float));
    if (plan->bias_out) mine.bias_sums = take(arena, capacity * LANES * sizeof(float));
  } else {
    mine.total = take(arena, batch * sizeof(double));
    mine.maximum = take(arena, batch * sizeof(float));
    if (plan->want_weighted) mine.result = take(arena, batch * dimension * sizeof(float));
  }
  if (arena->base) *scratch = mine;
}

/* Requests huge pages: page faults would take longer than writing the memory. */
static void use_large_pages(void *memory, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  uintptr_t start = ((uintptr_t)memory + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  uintptr_t stop = ((uintptr_t)memory + bytes) / ALIGNMENT * ALIGNMENT;
  if (start < stop) madvise((void *)start, stop - start, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

static void *allocate(struct plan *plan) {
  struct arena arena = {0, 0};
  for (int counted = 0; counted < 2; counted++) {
    take_shared(plan, &arena);
    for (int t = 0; t < plan->threads; t++)
      take_scratch(plan, arena.base ? &plan->scratch[t] : 0, &arena);
    if (counted) break;
    void *memory = 0;
    if (posix_memalign(&memory, ALIGNMENT, (arena.used + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT)) return 0;
    use_large_pages(memory, arena.used);
    arena.base = memory;
    arena.used = 0;
  }
  return arena.base;
}

static void plan_shapes(struct plan *plan, const struct plsc_rows *rows, const struct plsc_queries *queries,
                        const struct plsc_run *run, int64_t capacity) {
  plan->rows = *rows;
  plan->queries = *queries;
  plan->threads = run->threads;
  plan->capacity = capacity > rows->centers ? capacity : round_up(rows->centers, 32);
  plan->block_rows = plan->capacity / rows->centers * rows->centers;
  plan->padded_dimension = round_up(rows->dimension, 32);
  plan->panels = round_up(queries->count, 2 * LANES) / LANES;
  int64_t blocks = (plan->end - plan->begin + plan->block_rows - 1) / plan->block_rows;
  if (plan->threads > blocks) plan->threads = blocks > 0 ? (int)blocks : 1;
}

/* Fills the per-sample arrays; the padding samples of the last panel have no target and are not used. */
static void fill_samples(struct plan *plan, const float *shift) {
  const struct plsc_gradient *gradient = &plan->gradient;
  for (int64_t b = 0; b < plan->panels * LANES; b++) {
    int real = b < plan->queries.count;
    plan->shift[b] = real && shift ? shift[b] : 0;
    plan->threshold[b] = real && plan->queries.threshold ? plan->queries.threshold[b] : 0;
    plan->target_class[b] = real ? (int32_t)plan->queries.target[b] : -1;
    plan->target_row[b] = real && plan->is_update ? (int32_t)gradient->target_row[b] : -1;
    plan->weight[b] = real && plan->is_update ? gradient->weight[b] : 0;
    plan->coefficient[b] = real && plan->is_update ? gradient->target_coefficient[b] : 0;
    plan->factor[b] = 0;
    if (real && plan->is_update && gradient->kept)
      plan->factor[b] = __builtin_expf(gradient->shift[b] - gradient->log_total[b]);
  }
}

/* Thread t processes the panels t, t + threads, t + 2 threads, ... */
static void pack_share(void *context, int thread) {
  struct plan *plan = context;
  for (int64_t panel = thread; panel < plan->panels; panel += plan->threads)
    plan->engine->pack_queries(plan, panel);
}

static void reduce_share(void *context, int thread) {
  struct plan *plan = context;
  for (int64_t panel = thread; panel < plan->panels; panel += plan->threads)
    plan->engine->reduce_panel(plan, panel);
}

/* Starts threads only if there is enough work. */
static void over_panels(struct plan *plan, void (*work)(void *, int)) {
  if (plan->panels * plan->padded_dimension >= 1 << 14) {
    plsc_parallel(work, plan, plan->threads);
    return;
  }
  for (int t = 0; t < plan->threads; t++) work(plan, t);
}

static struct block block_at(const struct plan *plan, int64_t number) {
  struct block block;
  block.first = plan->begin + number * plan->block_rows;
  int64_t left = plan->end - block.first;
  block.rows = (int)(left < plan->block_rows ? left : plan->block_rows);
  return block;
}

static int64_t count_blocks(const struct plan *plan) {
  return (plan->end - plan->begin + plan->block_rows - 1) / plan->block_rows;
}

/* Plans the prefetch of the next block's rows and states. Only for selected rows: for consecutive rows the
 * hardware prefetcher is better. */
static void plan_prefetch(const struct plan *plan, struct prefetch *prefetch, int64_t number,
                          int64_t blocks) {
  size_t width = (size_t)row_bytes(&plan->rows);
  memset(prefetch, 0, sizeof *prefetch);
  if (number >= blocks || !plan->rows.position) return;
  struct block block = block_at(plan, number);
  prefetch->base[0] = plan->rows.weight;
  prefetch->row_bytes[0] = width;
  prefetch->arrays = 1;
  int wide_states = plan->rule.kind == PLSC_SGD || plan->rule.kind == PLSC_ADAMW ? 2 : 0;
  for (int i = 0; plan->is_update && i < wide_states; i++)
    if (plan->rule.state[i]) {
      prefetch->base[prefetch->arrays] = plan->rule.state[i];
      prefetch->row_bytes[prefetch->arrays++] =
          (size_t)plan->rows.dimension * (plan->rule.state_is_bf16[i] ? 2 : 4);
    }
  prefetch->position = plan->rows.position;
  int64_t lines = 0, chunks = (plan->panels * LANES + CHUNK - 1) / CHUNK;
  for (int i = 0; i < prefetch->arrays; i++) lines += (int64_t)(prefetch->row_bytes[i] + 63) / 64;
  int two = plan->is_update ? !plan->gradient.kept : plan->want_weighted;
  if (chunks) prefetch->lines_per_product = lines * block.rows / (chunks * (1 + two)) + 1;
  prefetch->row = block.first;
  prefetch->end = block.first + block.rows;
}

static void forward_share(void *context, int thread) {
  struct plan *plan = context;
  const struct engine *engine = plan->engine;
  struct scratch *scratch = &plan->scratch[thread];
  int64_t blocks = count_blocks(plan);
  int64_t stop = blocks * (thread + 1) / plan->threads, batch = plan->panels * LANES;
  for (int64_t b = 0; b < batch; b++) {
    scratch->total[b] = 0;
    scratch->maximum[b] = -__builtin_inff();
  }
  if (plan->want_weighted)
    memset(scratch->result, 0, (size_t)(batch * plan->padded_dimension) * sizeof(float));
  if (engine->begin) engine->begin();
  for (int64_t number = blocks * thread / plan->threads; number < stop; number++) {
    struct block block = block_at(plan, number);
    plan_prefetch(plan, &scratch->prefetch, number + 1, stop);
    engine->pack_rows(plan, scratch, block);
    for (int64_t panel = 0; panel < plan->panels; panel += CHUNK / LANES) {
      int64_t left = plan->panels - panel;
      int panels = (int)(left < CHUNK / LANES ? left : CHUNK / LANES);
      engine->logits(plan, scratch, block, panel, panels);
      engine->exponentials(plan, scratch, block, panel, panels);
      if (plan->want_weighted) engine->weighted_sum(plan, scratch, block, panel, panels);
    }
  }
  if (engine->end) engine->end();
}

static void update_share(void *context, int thread) {
  struct plan *plan = context;
  const struct engine *engine = plan->engine;
  struct scratch *scratch = &plan->scratch[thread];
  int64_t blocks = count_blocks(plan);
  if (engine->begin) engine->begin();
  /* Rows are independent, so threads take blocks dynamically. */
  int64_t number = __atomic_fetch_add(&plan->next_block, 1, __ATOMIC_RELAXED);
  while (number < blocks) {
    struct block block = block_at(plan, number);
    number = __atomic_fetch_add(&plan->next_block, 1, __ATOMIC_RELAXED);
    plan_prefetch(plan, &scratch->prefetch, number, blocks);
    if (!plan->gradient.kept) engine->pack_rows(plan, scratch, block);
    if (scratch->bias_sums)
      memset(scratch->bias_sums, 0, (size_t)plan->capacity * LANES * sizeof(float));
    if (!plan->panels) /* empty batch: the gradient is 0 */
      memset(scratch->result, 0, (size_t)(plan->capacity * plan->padded_dimension) * sizeof(float));
    for (int64_t panel = 0; panel < plan->panels; panel += CHUNK / LANES) {
      int64_t left = plan->panels - panel;
      int panels = (int)(left < CHUNK / LANES ? left : CHUNK / LANES);
      if (!plan->gradient.kept) engine->logits(plan, scratch, block, panel, panels);
      engine->coefficients(plan, scratch, block, panel, panels);
      engine->row_gradient(plan, scratch, block, panel, panels);
    }
    engine->finish_rows(plan, scratch, block);
  }
  if (engine->end) engine->end();
}

int32_t plsc_abi(void) { return PLSC_ABI; }

int32_t plsc_forward(const struct plsc_rows *rows, const struct plsc_queries *queries,
                     const struct plsc_run *run, int32_t fixed, float *shift, float *total, float *weighted,
                     uint16_t *kept) {
  struct plan plan;
  memset(&plan, 0, sizeof plan);
  if (!plsc_supports(run->engine)) return PLSC_NO_ENGINE;
  plan.engine = plsc_engines[run->engine];
  plan.fixed = fixed;
  plan.want_weighted = weighted != 0;
  plan.end = rows->count;
  plan_shapes(&plan, rows, queries, run, plan.engine->forward_rows);
  plan.weighted_out = weighted;
  plan.total_out = total;
  plan.shift_out = shift;
  plan.kept = kept;
  void *memory = allocate(&plan);
  if (!memory) return PLSC_NO_MEMORY;
  if (kept) use_large_pages(kept, (size_t)(plan.panels * LANES * rows->count) * sizeof *kept);
  fill_samples(&plan, fixed ? shift : 0);
  over_panels(&plan, pack_share);
  plsc_parallel(forward_share, &plan, plan.threads);
  over_panels(&plan, reduce_share);
  free(memory);
  return PLSC_OK;
}

int32_t plsc_update(const struct plsc_rows *rows, const struct plsc_queries *queries,
                    const struct plsc_gradient *gradient, const struct plsc_rule *rule,
                    const struct plsc_run *run, int64_t begin, int64_t end, float *out, float *bias_out) {
  struct plan plan;
  memset(&plan, 0, sizeof plan);
  if (!plsc_supports(run->engine)) return PLSC_NO_ENGINE;
  plan.engine = plsc_engines[run->engine];
  plan.is_update = 1;
  plan.gradient = *gradient;
  plan.rule = *rule;
  plan.begin = begin;
  plan.end = end;
  plan_shapes(&plan, rows, queries, run, plan.engine->update_rows);
  plan.out = out;
  plan.bias_out = bias_out;
  void *memory = allocate(&plan);
  if (!memory) return PLSC_NO_MEMORY;
  fill_samples(&plan, gradient->log_total);
  over_panels(&plan, pack_share);
  plsc_parallel(update_share, &plan, plan.threads);
  free(memory);
  return PLSC_OK;
}
