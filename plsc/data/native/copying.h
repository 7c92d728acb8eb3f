/* Shared by copying.c and buckets.c: lines that are copied, and the file that they are written to. */
#ifndef PLSC_DATA_COPYING_H
#define PLSC_DATA_COPYING_H

#include "native.h"

#include <setjmp.h>
#include <string.h>

#define FACTORS 32768 /* _WORDS of checksum.py */
#define CAPACITY ((int64_t)FACTORS * 8) /* put together, summed and written while it is in the cache */
#define BLOCK 4096 /* what is written past the system's cache is aligned to this, in memory and in the file */

enum status { DONE, NO_MEMORY, CANNOT_WRITE, CUT_SHORT, OUTSIDE };

static inline uint64_t splitmix64(uint64_t value) {
    uint64_t z = value + UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static inline uint64_t little_endian(uint64_t word) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return __builtin_bswap64(word);
#else
    return word;
#endif
}

static inline uint64_t word_at(const uint8_t *data) {
    uint64_t word;
    memcpy(&word, data, 8);
    return little_endian(word);
}

/* Lines to be copied: line i lies in memories[files[i]], in memories[0] without files. */
struct lines {
    const uint8_t *const *memories;
    const int64_t *sizes; /* of the memories, in bytes */
    int64_t memory_count;
    const int32_t *files;
    const int64_t *starts;
    const int64_t *lengths; /* newline excluded */
    int64_t count;
};

/* What came of a copy: its checksum; what went wrong, with which line, and errno. */
struct outcome {
    uint64_t checksum;
    int64_t line;
    int32_t status;
    int32_t error;
};

/* A file that is written from an offset on, in pieces that end at multiples of CAPACITY. */
struct output {
    int handle;
    int direct;   /* the same file, opened so that the system's cache is passed by; -1: there is none */
    int64_t base; /* offset of buffer[0] in the file, a multiple of CAPACITY */
    int64_t lead, fill; /* buffer[lead, fill) waits to be written */
    uint8_t *buffer;
    const uint64_t *factors; /* NULL: no checksum is wanted */
    struct outcome *outcome;
};

/* The functions return 1, or 0 when the outcome says what went wrong. */
int fail(struct outcome *outcome, int status, int error);
int open_output(struct output *out, int handle, int64_t offset);
int flush(struct output *out);
int put(struct output *out, const void *data, int64_t size);
int put_line(struct output *out, const struct lines *lines, int64_t line);

/* What `size` bytes at `offset` of a file add to its checksum. factors: FACTORS of them. */
PLSC_API uint64_t plsc_checksum(const uint8_t *data, int64_t size, int64_t offset,
                                const uint64_t *factors);

/* Where a line is; NULL, and the outcome says so, if that is outside of its memory. */
const uint8_t *line_at(struct output *out, const struct lines *lines, int64_t line);

/* Where a thread goes on when a mapped file that it reads is cut short, while plsc_catch_truncation is on. */
extern __thread sigjmp_buf *volatile way_out;

#endif
