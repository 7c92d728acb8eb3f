/* The engines, and which of them the CPU and the operating system support. */
#include "pass.h"

const struct engine *plsc_engines[PLSC_ENGINES];

#if defined(__x86_64__)
#if defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define TILE_DATA 18 /* the XSAVE state component of the tile registers */

/* AMX-BF16. Linux grants the tile registers on request, if it saves them. */
static int has_tiles(void) {
  uint32_t a, b, c, d, bits = 1u << 22 | 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & bits) != bits) return 0;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}
#else
static int has_tiles(void) { return 0; }
#endif

/* __builtin_cpu_supports is also false if the operating system does not save the registers. */
int32_t plsc_has_instructions(int32_t engine) {
  int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  int bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  switch (engine) {
    case PLSC_AVX2: return avx2;
    case PLSC_AVX512: return avx512;
    case PLSC_AVX512_BF16: return bf16;
    case PLSC_AMX: return bf16 && has_tiles();
    default: return 0;
  }
}
#else
int32_t plsc_has_instructions(int32_t engine) { return engine == PLSC_NEON; }
#endif

int32_t plsc_supports(int32_t engine) {
  return plsc_engines[engine] && plsc_has_instructions(engine);
}
