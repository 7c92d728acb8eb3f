/* AVX-512 functions: exp, bfloat16, noise, 8-bit rows. Included only by files that are compiled for AVX-512. */
#ifndef PLSC_VECTOR_H
#define PLSC_VECTOR_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "pass.h"

#define INLINE static inline __attribute__((always_inline))
#define SHORTEST 0x1p-120f /* as in plsc/heads/geometry.py */

/* e^x with a relative error of 1e-7; 0 instead of denormal numbers (they are slow), infinity above the
 * range, NaN for NaN. */
INLINE __m512 exp_vector(__m512 x) {
  __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_LT_OQ);
  x = _mm512_min_ps(_mm512_set1_ps(128.0f), x); /* min returns its second operand for NaN */
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                  _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  /* 1 + r + r^2 q(r), with q fitted for minimal relative error on |r| <= ln 2 / 2. */
  __m512 q = _mm512_set1_ps(0.0013814320554956794f);
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0.00836885068565607f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0.041668400168418884f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0.1666651964187622f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0.4999999403953552f));
  q = _mm512_fmadd_ps(q, _mm512_mul_ps(r, r), r);
  q = _mm512_add_ps(q, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(_mm512_knot(tiny), q, n);
}

INLINE __m512 widen_bf16(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

/* Rounds to the nearest bfloat16, ties to even; NaN stays NaN. */
INLINE __m256i narrow_bf16(__m512 x) {
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

/* Loads the elements [16 i, 16 i + 16) of a row; those outside `mask` are 0. */
INLINE __m512 load_row(const void *row, int is_bf16, int64_t i, __mmask16 mask) {
  if (is_bf16) return widen_bf16(_mm256_maskz_loadu_epi16(mask, (const uint16_t *)row + 16 * i));
  return _mm512_maskz_loadu_ps(mask, (const float *)row + 16 * i);
}

/* The mask of the elements [16 i, 16 i + 16) that are below D. */
INLINE __mmask16 row_mask(int64_t i, int64_t dimension) {
  int64_t left = dimension - 16 * i;
  return left >= 16 ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
}

/* The norm in double, for rows that are very short, very long, zero or not finite. */
static __attribute__((noinline, unused)) float inverse_of_extreme(const void *row, int is_bf16,
                                                                  int64_t dimension) {
  __m512d squares = _mm512_setzero_pd();
  for (int64_t i = 0; 16 * i < dimension; i++) {
    __m512 w = load_row(row, is_bf16, i, row_mask(i, dimension));
    __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(w));
    __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(w, 1));
    squares = _mm512_fmadd_pd(high, high, _mm512_fmadd_pd(low, low, squares));
  }
  float length = (float)__builtin_sqrt(_mm512_reduce_add_pd(squares));
  return length >= SHORTEST ? 1.0f / length : 0;
}

/* 1 / |row|, or 0 if |row| counts as zero, as plsc/heads/geometry.py. */
INLINE float inverse_length(const void *row, int is_bf16, int64_t dimension) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; 16 * i < dimension; i++) {
    __m512 w = load_row(row, is_bf16, i, row_mask(i, dimension));
    sum = _mm512_fmadd_ps(w, w, sum);
  }
  float squares = _mm512_reduce_add_ps(sum);
  if (squares >= 0x1p-80f && squares <= __FLT_MAX__) return 1.0f / __builtin_sqrtf(squares);
  return inverse_of_extreme(row, is_bf16, dimension);
}

/* The hash of plsc/heads/rules.py (_mix). */
#define GOLDEN 0x9e3779b9u

INLINE uint32_t mix_number(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

INLINE uint32_t noise_key(int64_t row, uint32_t key) {
  uint64_t number = (uint64_t)row;
  return mix_number((uint32_t)number ^ mix_number((uint32_t)(number >> 32) ^ key));
}

INLINE __m512i mix_vector(__m512i x) {
  x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
  x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x7feb352d));
  x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
  x = _mm512_mullo_epi32(x, _mm512_set1_epi32((int)0x846ca68bu));
  return _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
}

/* Random bits for the elements [16 i, 16 i + 16) of a row. */
INLINE __m512i noise_vector(int64_t i, uint32_t row_key) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i lanes = _mm512_mullo_epi32(lane, _mm512_set1_epi32((int)GOLDEN)); /* a constant */
  __m512i column = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(GOLDEN * 16 * (uint32_t)i)));
  return mix_vector(_mm512_xor_si512(column, _mm512_set1_epi32((int)row_key)));
}

/* Stores the elements [16 i, 16 i + 16) of a row; bfloat16 is rounded stochastically. */
INLINE void store_row(void *row, int is_bf16, int64_t i, __mmask16 mask, __m512 x, uint32_t row_key) {
  if (!is_bf16) {
    _mm512_mask_storeu_ps((float *)row + 16 * i, mask, x);
    return;
  }
  __m512i noise = noise_vector(i, row_key);
  __m512i bits = _mm512_castps_si512(x);
  __m512i exponent = _mm512_set1_epi32(0x7f800000);
  __mmask16 finite = _mm512_cmpneq_epi32_mask(_mm512_and_si512(bits, exponent), exponent);
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  bits = _mm512_mask_add_epi32(bits, finite, bits, _mm512_srli_epi32(noise, 16));
  bits = _mm512_mask_or_epi32(bits, nan, bits, _mm512_set1_epi32(0x400000));
  __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
  _mm256_mask_storeu_epi16((uint16_t *)row + 16 * i, mask, half);
}

INLINE char *stored_row(const struct plan *plan, int64_t position) {
  return (char *)plan->rows.weight + position * row_bytes(&plan->rows);
}

/* A row that load_row can read: the stored one, or the values of an 8-bit row, which are written to `out`. */
INLINE char *readable_row(const struct plan *plan, int64_t position, float *out) {
  char *row = stored_row(plan, position);
  if (!plan->rows.is_coded) return row;
  int64_t dimension = plan->rows.dimension;
  float scale;
  memcpy(&scale, row + dimension, sizeof scale);
  for (int64_t i = 0; 16 * i < dimension; i++) {
    __m128i codes = _mm_maskz_loadu_epi8(row_mask(i, dimension), row + 16 * i);
    __m512 w = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
    _mm512_store_ps(out + 16 * i, _mm512_mul_ps(w, _mm512_set1_ps(scale)));
  }
  return (char *)out;
}

/* encode_rows of plsc/heads/weights.py, with stochastic rounding. */
INLINE void encode_row(char *row, const float *values, int64_t dimension, uint32_t row_key) {
  __m512 highest = _mm512_setzero_ps();
  __mmask16 bad = 0;
  for (int64_t i = 0; 16 * i < dimension; i++) {
    __m512 w = _mm512_maskz_loadu_ps(row_mask(i, dimension), values + 16 * i);
    bad |= _mm512_fpclass_ps_mask(w, 0x99); /* NaN and infinities */
    highest = _mm512_max_ps(highest, _mm512_abs_ps(w));
  }
  float peak = _mm512_reduce_max_ps(highest), scale;
  memcpy(&scale, row + dimension, sizeof scale);
  if (!(peak <= scale * 127 && peak >= scale * 63)) scale = peak / 96;
  if (bad) scale = __builtin_nanf("");
  __m512 inverse = _mm512_set1_ps(scale > 0 ? 1 / scale : 0);
  __m512 most = _mm512_set1_ps(127), least = _mm512_set1_ps(-127);
  for (int64_t i = 0; 16 * i < dimension; i++) {
    __mmask16 mask = row_mask(i, dimension);
    __m512 fraction = _mm512_cvtepi32_ps(_mm512_srli_epi32(noise_vector(i, row_key), 8));
    __m512 w = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, values + 16 * i), inverse);
    w = _mm512_fmadd_ps(fraction, _mm512_set1_ps(0x1p-24f), w);
    w = _mm512_roundscale_ps(w, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    w = bad ? _mm512_setzero_ps() : _mm512_max_ps(least, _mm512_min_ps(most, w));
    _mm_mask_storeu_epi8(row + 16 * i, mask, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(w)));
  }
  memcpy(row + dimension, &scale, sizeof scale);
}

#endif
