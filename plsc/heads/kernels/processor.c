/* Detects which engines the CPU and the operating system support. */
#include "pass.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define TILE_DATA 18 /* the XSAVE state component of the tile registers */

static uint64_t enabled_state(void) {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

static int has_bits(uint32_t value, uint32_t bits) { return (value & bits) == bits; }

/* AVX-512 F, DQ, BW, VL, with all vector state saved by the operating system. */
static int has_vectors(void) {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !has_bits(c, 1u << 27)) return 0; /* xgetbv */
  if (!has_bits((uint32_t)enabled_state(), 0xe6)) return 0;
  if (!has_bits(c, 1u << 12)) return 0; /* FMA */
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  return has_bits(b, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31);
}

static int has_bf16_vectors(void) {
  uint32_t a, b, c, d;
  if (!has_vectors() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || a < 1) return 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && has_bits(a, 1u << 5);
}

static int has_tiles(void) {
  uint32_t a, b, c, d;
  if (!has_bf16_vectors() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  if (!has_bits(d, 1u << 22 | 1u << 24)) return 0;
  if (!has_bits((uint32_t)enabled_state(), 3u << 17)) return 0;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0; /* Linux requires a request */
}

int32_t plsc_supports(int32_t engine) {
  switch (engine) {
    case PLSC_FP32: return plsc_fp32_engine() && has_vectors();
    case PLSC_BF16_VECTOR: return plsc_vector_engine() && has_bf16_vectors();
    case PLSC_BF16_TILES: return plsc_tiles_engine() && has_tiles();
  }
  return 0;
}
#else
int32_t plsc_supports(int32_t engine) {
  (void)engine;
  return 0;
}
#endif
