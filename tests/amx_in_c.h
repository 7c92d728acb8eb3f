/* AMX in C, to test the kernels for it on other processors: CC="gcc -include amx_in_c.h". A tile is 16 x 16 floats
 * (0 to 3), or 16 rows of 32 bfloat16 (4 to 7), as in plsc/heads/kernels/tiles.h. With -DFREE_PRODUCTS tiles are
 * loaded and stored but not multiplied, to time everything else (wrong results; set the learning rate to 0). */
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* For processor.c: has AMX, and the system grants it. */
#define __get_cpuid_count(leaf, subleaf, a, b, c, d) (*(a) = *(b) = *(c) = 0, *(d) = ~0u, 1)
#define syscall(...) 0

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(configuration) ((void)(configuration))
#define _tile_release() ((void)0)
#define _tile_loadd(t, at, stride) copy_tile(tile[t], 64, at, stride)
#define _tile_stored(t, at, stride) copy_tile(at, stride, tile[t], 64)
#define _tile_zero(t) memset(tile[t], 0, sizeof tile[t])
#if defined(FREE_PRODUCTS)
#define _tile_dpbf16ps(to, left, right) __asm__ volatile("" : "+m"(tile[to]) : "m"(tile[left]), "m"(tile[right]))
#else
#define _tile_dpbf16ps multiply_tiles
#endif

static __thread uint32_t tile[8][16][16];

static inline void copy_tile(void *to, long to_stride, const void *from, long from_stride) {
  for (int row = 0; row < 16; row++)
    memcpy((char *)to + row * to_stride, (const char *)from + row * from_stride, 64);
}

static inline float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static inline __attribute__((unused)) void multiply_tiles(int to, int left, int right) {
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      float sum = as_float(tile[to][m][n]);
      for (int k = 0; k < 16; k++) {
        uint32_t a = tile[left][m][k], b = tile[right][k][n];
        sum += as_float(a << 16) * as_float(b << 16) + as_float(a & 0xffff0000) * as_float(b & 0xffff0000);
      }
      memcpy(&tile[to][m][n], &sum, sizeof sum);
    }
}
#endif
