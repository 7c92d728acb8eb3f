/* bfloat16 products on AMX, for bf16.c: 2 x 2 result tiles stay in registers. */
#define FORWARD_ROWS 256
#define BEGIN begin_tiles
#define END end_tiles

struct tile_configuration {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

/* Eight tiles of 16 rows of 64 bytes. Static, because gcc 12 drops the stores to a local one. */
static const struct tile_configuration configuration = {
    .palette = 1,
    .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
    .rows = {16, 16, 16, 16, 16, 16, 16, 16},
};

static void begin_tiles(void) { _tile_loadconfig(&configuration); }

static void end_tiles(void) { _tile_release(); }

INLINE void multiply_some(const struct factors *f, int m, int n, int two_m, int two_n,
                          struct prefetch *prefetch, int64_t lines) {
  const char *left = f->left + m * f->left_stride, *right = f->right + n * f->right_stride;
  float *result = f->result + m * f->result_m + n * f->result_n;
  float *below = result + f->result_m;
  if (f->adds) {
    _tile_loadd(0, result, 64);
    if (two_n) _tile_loadd(1, result + f->result_n, 64);
    if (two_m) _tile_loadd(2, below, 64);
    if (two_m && two_n) _tile_loadd(3, below + f->result_n, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < f->k; k++, left += FACTOR_TILE, right += FACTOR_TILE) {
    _tile_loadd(4, left, 64);
    _tile_loadd(6, right, 64);
    if (two_n) _tile_loadd(7, right + f->right_stride, 64);
    if (two_m) _tile_loadd(5, left + f->left_stride, 64);
    prefetch_lines(prefetch, lines);
    _tile_dpbf16ps(0, 4, 6);
    if (two_n) _tile_dpbf16ps(1, 4, 7);
    if (two_m) _tile_dpbf16ps(2, 5, 6);
    if (two_m && two_n) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, result, 64);
  if (two_n) _tile_stored(1, result + f->result_n, 64);
  if (two_m) _tile_stored(2, below, 64);
  if (two_m && two_n) _tile_stored(3, below + f->result_n, 64);
}

static void multiply(const struct factors *f, struct prefetch *prefetch) {
  __asm__ volatile("" ::: "memory"); /* GCC does not know that _tile_loadd reads memory */
  int64_t lines = lines_per_step(prefetch, (int64_t)((f->n + 1) / 2) * ((f->m + 1) / 2) * f->k);
  for (int n = 0; n < f->n; n += 2)
    for (int m = 0; m < f->m; m += 2) {
      int two_m = m + 1 < f->m, two_n = n + 1 < f->n;
      if (two_m && two_n)
        multiply_some(f, m, n, 1, 1, prefetch, lines);
      else if (two_m)
        multiply_some(f, m, n, 1, 0, prefetch, lines);
      else if (two_n)
        multiply_some(f, m, n, 0, 1, prefetch, lines);
      else
        multiply_some(f, m, n, 0, 0, prefetch, lines);
    }
}
