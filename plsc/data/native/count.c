/* How often a byte comes in a text, at the speed of memory. */
#include "native.h"

PLSC_API int64_t plsc_count_byte(const unsigned char *text, int64_t length, int32_t byte);

int64_t plsc_count_byte(const unsigned char *text, int64_t length, int32_t byte) {
    const unsigned char wanted = (unsigned char)byte;
    int64_t count = 0, i = 0;
    while (i < length) {
        /* Sums of at most 255 ones fit bytes, which the compiler adds many at a time. */
        unsigned char sums[64] = {0};
        int64_t rounds = (length - i) / 64 < 255 ? (length - i) / 64 : 255;
        for (int64_t round = 0; round < rounds; round++, i += 64)
            for (int j = 0; j < 64; j++) sums[j] += text[i + j] == wanted;
        for (int j = 0; j < 64; j++) count += sums[j];
        if (rounds < 255)
            for (; i < length; i++) count += text[i] == wanted;
    }
    return count;
}
