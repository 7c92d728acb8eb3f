/* zlib's CRC-32 (reflected polynomial 0xEDB88320) by carry-less multiplication: Gopal et al., "Fast CRC
   Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009. The Python counterpart is
   zlib.crc32. The constants are the paper's: x^n mod P for the folding distances, bit-reflected. */
#include "native.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define TARGET __attribute__((target("pclmul,sse4.1")))

/* Multiply the `low` and `high` halves of a by the constants k (folding) and add them to `there`. */
TARGET static inline __m128i folded(__m128i a, __m128i k, __m128i there) {
    __m128i low = _mm_clmulepi64_si128(a, k, 0x00);
    __m128i high = _mm_clmulepi64_si128(a, k, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), there);
}

/* The CRC of `size` bytes, a multiple of 16 and at least 64; crc before and after without inversion. */
TARGET static uint32_t crc_of_blocks(const uint8_t *data, int64_t size, uint32_t crc) {
    const __m128i by_512 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i by_128 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i by_64 = _mm_set_epi64x(0, 0x0163cd6124);
    const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i words = _mm_setr_epi32(~0, 0, ~0, 0);
    const __m128i *next = (const __m128i *)data;
    __m128i lane[4], sum, part;
    for (int i = 0; i < 4; i++)
        lane[i] = _mm_loadu_si128(next++);
    lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128((int)crc));
    for (size -= 64; size >= 64; size -= 64)
        for (int i = 0; i < 4; i++)
            lane[i] = folded(lane[i], by_512, _mm_loadu_si128(next++));
    sum = lane[0];
    for (int i = 1; i < 4; i++)
        sum = folded(sum, by_128, lane[i]);
    for (; size >= 16; size -= 16)
        sum = folded(sum, by_128, _mm_loadu_si128(next++));
    /* 128 bits to 64, then Barrett reduction to 32 */
    sum = _mm_xor_si128(_mm_srli_si128(sum, 8), _mm_clmulepi64_si128(sum, by_128, 0x10));
    part = _mm_clmulepi64_si128(_mm_and_si128(sum, words), by_64, 0x00);
    sum = _mm_xor_si128(_mm_srli_si128(sum, 4), part);
    part = _mm_clmulepi64_si128(_mm_and_si128(sum, words), barrett, 0x10);
    part = _mm_clmulepi64_si128(_mm_and_si128(part, words), barrett, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(sum, part), 1);
}

static int has_products(void) {
    const unsigned wanted = 1u << 1 | 1u << 19; /* PCLMULQDQ and SSE4.1 */
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & wanted) == wanted;
}
#endif

/* Store zlib's crc32 of each of `count` rows of `size` bytes, a multiple of 16 and at least 64, which starts at
   `crc`. Return 0, or -1 if the processor lacks PCLMULQDQ. */
PLSC_API int64_t plsc_crc32_rows(const uint8_t *data, int64_t count, int64_t size, uint32_t crc, uint32_t *found) {
#if defined(__x86_64__)
    if (size < 64 || size % 16 || !has_products()) return -1;
    for (int64_t i = 0; i < count; i++)
        found[i] = ~crc_of_blocks(data + i * size, size, ~crc);
    return 0;
#else
    (void)data, (void)count, (void)size, (void)crc, (void)found;
    return -1;
#endif
}
