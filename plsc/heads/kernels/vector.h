/* Vectors of the processor's width in the vector extension of GCC and clang: exp, bfloat16, noise, 8-bit rows.
 *
 * A comparison gives a vector of integers, -1 where it is true. An engine (fp32.c, bf16.c) includes this file,
 * elements.h and rules.h, so that they are compiled once per instruction set.
 */
#ifndef PLSC_VECTOR_H
#define PLSC_VECTOR_H

#include <stdint.h>
#include <string.h>

#include "pass.h"

/* What differs between instruction sets: the width, and what the extension has no word or a slow one for. */
#if defined(__AVX512F__)
#include <immintrin.h>
#define WIDTH 16 /* floats per vector */
#define SQUARE_ROOTS(x) _mm512_sqrt_ps(x)
#define HIGHER(a, b) _mm512_max_epi32((__m512i)(a), (__m512i)(b))
#define FLOOR(x) _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)
#define WIDEN(halves) _mm512_cvtepu16_epi32((__m256i)(halves))
#define WIDEN_BYTES(at) _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(at)))
#define TO_BYTES(integers) __builtin_convertvector(integers, bytes)
#elif defined(__AVX2__)
#include <immintrin.h>
#define WIDTH 8
#define SQUARE_ROOTS(x) _mm256_sqrt_ps(x)
#define HIGHER(a, b) _mm256_max_epi32((__m256i)(a), (__m256i)(b))
#define FLOOR(x) _mm256_floor_ps(x)
#define WIDEN(halves) _mm256_cvtepu16_epi32((__m128i)(halves))
#define WIDEN_BYTES(at) _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(at)))
#define TO_BYTES(integers) __builtin_convertvector(__builtin_convertvector(integers, shorts), bytes)
#else
#include <arm_neon.h>
#define WIDTH 4
#define SQUARE_ROOTS(x) vsqrtq_f32(x)
#define HIGHER(a, b) vmaxq_s32(a, b)
#define FLOOR(x) vrndmq_f32(x)
#define WIDEN(halves) __builtin_convertvector(halves, uvec)
#define WIDEN_BYTES(at) (ivec){(at)[0], (at)[1], (at)[2], (at)[3]}
#define TO_BYTES(integers) __builtin_convertvector(integers, bytes)
#endif

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define INLINE static inline __attribute__((always_inline))
#define SHORTEST 0x1p-120f /* as in plsc/heads/softmax.py */
#define MINUS_INFINITY (-__builtin_inff())

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef float loose __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias)); /* in memory */
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t uvec __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t halves __attribute__((vector_size(2 * WIDTH)));
typedef int16_t shorts __attribute__((vector_size(2 * WIDTH)));
typedef int8_t bytes __attribute__((vector_size(WIDTH)));

INLINE vec all(float x) { return x - (vec){0}; }

INLINE vec load(const float *at) { return *(const loose *)at; }

INLINE void store(float *at, vec x) { *(loose *)at = x; }

INLINE ivec load_integers(const int32_t *at) {
  ivec x;
  memcpy(&x, at, sizeof x);
  return x;
}

INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

INLINE vec where(ivec mask, vec x) { return (vec)(mask & (ivec)x); }

INLINE float sum_of(vec x) {
#if WIDTH == 16
  return _mm512_reduce_add_ps(x);
#elif WIDTH == 8
  __m128 sums = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  sums = _mm_add_ps(sums, _mm_movehl_ps(sums, sums));
  return sums[0] + sums[1];
#else
  return vaddvq_f32(x);
#endif
}

INLINE int any(ivec mask) {
  int32_t found = 0;
  for (int i = 0; i < WIDTH; i++) found |= mask[i];
  return found;
}

/* The place of element d of a row of tiles. */
INLINE int64_t in_tiles(int64_t d) { return d / LANES * TILE + d % LANES; }

/* e^x with a relative error of 1e-7; 0 instead of denormal numbers (they are slow), infinity above the
 * range, NaN for NaN. */
INLINE vec exp_vector(vec x) {
#if WIDTH == 16
  x = _mm512_min_ps(all(128.0f), x);
#endif
  vec n = x * 1.44269504f + 0x1.8p23f - 0x1.8p23f; /* to the nearest integer */
  vec r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  /* 1 + r + r^2 q(r), with q fitted for minimal relative error on |r| <= ln 2 / 2. */
  vec q = 0.0013814320554956794f * r + 0.00836885068565607f;
  q = q * r + 0.041668400168418884f;
  q = q * r + 0.1666651964187622f;
  q = q * r + 0.4999999403953552f;
  q = q * (r * r) + r;
  q = q + 1.0f;
#if WIDTH == 16
  vec power = _mm512_scalef_ps(q, n);
#else
  vec power = (vec)((uvec)q + ((uvec)__builtin_convertvector(n, ivec) << 23));
  power = choose(x > 88.72283f, all(__builtin_inff()), power);
#endif
  return where(~(x < -87.3f), power);
}

INLINE vec widen_bf16(halves bits) { return (vec)((uvec)WIDEN(bits) << 16); }

INLINE halves upper_halves(uvec bits) { return __builtin_convertvector(bits >> 16, halves); }

/* Adds to the bits of numbers; NaN stays NaN. The lower half of the bits of an infinity is 0. */
INLINE uvec add_bits(vec x, uvec more) {
  return (uvec)choose(x != x, (vec)((uvec)x | 0x400000), (vec)((uvec)x + more));
}

/* Rounds to the nearest bfloat16, ties to even; NaN stays NaN. */
INLINE halves narrow_bf16(vec x) { return upper_halves(add_bits(x, ((uvec)x >> 16 & 1) + 0x7fff)); }

static inline float read_number(const void *at, int is_bf16) {
  if (!is_bf16) return *(const float *)at;
  uint32_t bits = (uint32_t)*(const uint16_t *)at << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

#if WIDTH != 16
static __attribute__((noinline)) vec load_tail(const void *row, int is_bf16, int64_t d, int64_t dimension) {
  float tail[WIDTH] = {0};
  for (int64_t i = 0; d + i < dimension; i++)
    tail[i] = read_number((const char *)row + (d + i) * (is_bf16 ? 2 : 4), is_bf16);
  return load(tail);
}
#endif

/* Loads the elements [d, d + WIDTH) of a row; those from `dimension` on are 0. */
INLINE vec load_row(const void *row, int is_bf16, int64_t d, int64_t dimension) {
#if WIDTH == 16 /* masks are faster than a branch */
  int64_t left = dimension - d;
  __mmask16 mask = left >= 16 ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
  if (!is_bf16) return _mm512_maskz_loadu_ps(mask, (const float *)row + d);
  halves x = (halves)_mm256_maskz_loadu_epi16(mask, (const uint16_t *)row + d);
#else
  if (__builtin_expect(d + WIDTH > dimension, 0)) return load_tail(row, is_bf16, d, dimension);
  if (!is_bf16) return load((const float *)row + d);
  halves x;
  memcpy(&x, (const uint16_t *)row + d, sizeof x);
#endif
  return widen_bf16(x);
}

/* Stores those of WIDTH elements for which there is room. */
#define STORE_SOME(at, x, room)                         \
  if (__builtin_expect((room) < WIDTH, 0)) {            \
    __typeof__(x) tail = x; /* only the tail needs an address */ \
    memcpy(at, &tail, (size_t)(room) * sizeof *(at));   \
  } else                                                \
    memcpy(at, &(x), sizeof(x))

/* The norm in double, for rows that are very short, very long, zero or not finite. */
static __attribute__((noinline)) float inverse_of_extreme(const void *row, int is_bf16, int64_t dimension) {
  double squares = 0;
  for (int64_t d = 0; d < dimension; d++) {
    double w = read_number((const char *)row + d * (is_bf16 ? 2 : 4), is_bf16);
    squares += w * w;
  }
  float length = (float)__builtin_sqrt(squares);
  return length >= SHORTEST ? 1.0f / length : 0;
}

/* 1 / |row|, or 0 if |row| counts as zero, as plsc/heads/softmax.py. */
INLINE float inverse_length(const void *row, int is_bf16, int64_t dimension) {
  vec sum = {0};
  for (int64_t d = 0; d < dimension; d += WIDTH) {
    vec w = load_row(row, is_bf16, d, dimension);
    sum += w * w;
  }
  float squares = sum_of(sum);
  if (squares >= 0x1p-80f && squares <= __FLT_MAX__) return 1.0f / __builtin_sqrtf(squares);
  return inverse_of_extreme(row, is_bf16, dimension);
}

/* The hash of plsc/heads/weights.py (_mix), of a number or of each element of a vector. */
#define GOLDEN 0x9e3779b9u
#define MIX(x) (x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^ (x >> 16))

INLINE uint32_t mix_number(uint32_t x) { return MIX(x); }

INLINE uint32_t noise_key(int64_t row, uint32_t key) {
  uint64_t number = (uint64_t)row;
  return mix_number((uint32_t)number ^ mix_number((uint32_t)(number >> 32) ^ key));
}

/* Random bits for the elements [d, d + WIDTH) of a row. */
INLINE uvec noise_vector(int64_t d, uint32_t row_key) {
  static const uint32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  uvec x;
  memcpy(&x, numbers, sizeof x);
  x = (x * GOLDEN + GOLDEN * (uint32_t)d) ^ row_key;
  return MIX(x);
}

/* Stores the elements [d, d + WIDTH) of a row; bfloat16 is rounded stochastically. */
INLINE void store_row(void *row, int is_bf16, int64_t d, int64_t dimension, vec x, uint32_t row_key) {
  if (is_bf16) {
    halves half = upper_halves(add_bits(x, noise_vector(d, row_key) >> 16));
    STORE_SOME((uint16_t *)row + d, half, dimension - d);
  } else {
    STORE_SOME((float *)row + d, x, dimension - d);
  }
}

INLINE char *stored_row(const struct plan *plan, int64_t position) {
  return (char *)plan->rows.weight + position * row_bytes(&plan->rows);
}

/* A row that load_row can read: the stored one, or the values of an 8-bit row, which are written to `out`. */
INLINE char *readable_row(const struct plan *plan, int64_t position, float *out) {
  char *row = stored_row(plan, position);
  if (!plan->rows.is_coded) return row;
  const int8_t *codes = (int8_t *)row;
  int64_t dimension = plan->rows.dimension, d = 0;
  float scale;
  memcpy(&scale, row + dimension, sizeof scale);
  for (; d + WIDTH <= dimension; d += WIDTH)
    store(out + d, __builtin_convertvector((ivec)WIDEN_BYTES(codes + d), vec) * scale);
  for (; d < dimension; d++) out[d] = (float)codes[d] * scale;
  return (char *)out;
}

/* encode_rows of plsc/heads/weights.py, with stochastic rounding. */
INLINE void encode_row(char *row, const float *values, int64_t dimension, uint32_t row_key) {
  ivec highest = {0};
  for (int64_t d = 0; d < dimension; d += WIDTH)
    highest = (ivec)HIGHER(highest, (ivec)load_row(values, 0, d, dimension) & 0x7fffffff);
  int32_t bits = 0; /* of the largest magnitude; from infinity's on, not finite */
  for (int i = 0; i < WIDTH; i++) bits = highest[i] > bits ? highest[i] : bits;
  float peak, scale;
  memcpy(&peak, &bits, sizeof peak);
  memcpy(&scale, row + dimension, sizeof scale);
  if (!(peak <= scale * 127 && peak >= scale * 63)) scale = peak / 96;
  if (bits >= 0x7f800000) scale = __builtin_nanf("");
  memcpy(row + dimension, &scale, sizeof scale);
  if (!(scale > 0)) {
    memset(row, 0, (size_t)dimension);
    return;
  }
  float inverse = 1 / scale;
  for (int64_t d = 0; d < dimension; d += WIDTH) {
    vec w = load_row(values, 0, d, dimension);
    w = __builtin_convertvector((ivec)(noise_vector(d, row_key) >> 8), vec) * 0x1p-24f + w * inverse;
    ivec code = __builtin_convertvector((vec)FLOOR(w), ivec);
    code += code > 127; /* rounding errors exceed the range by one at most */
    code -= code < -127;
    bytes codes = TO_BYTES(code);
    STORE_SOME((int8_t *)row + d, codes, dimension - d);
  }
}

#endif
