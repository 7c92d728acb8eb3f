/* Copy lines to a file in a new order, and compute the checksum of files, for a partition. The Python
   counterparts are in plsc/data/partition/parts.py. */
#include "native.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FACTORS 32768 /* _WORDS of parts.py */
#define CAPACITY ((int64_t)FACTORS * 8) /* collected, summed and written at a time, while in the cache */

static inline uint64_t splitmix64(uint64_t value) {
    uint64_t z = value + UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static inline uint64_t word_at(const uint8_t *data) {
    uint64_t word;
    memcpy(&word, data, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

/* Return the sum of `count` words, each times its factor. GCC would vectorise the 64-bit products, which is
   slower than scalar code. */
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("no-tree-vectorize")))
#endif
static uint64_t weighted(const uint8_t *data, const uint64_t *factors, int64_t count) {
    uint64_t a = 0, b = 0, c = 0, d = 0;
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
        a += word_at(data + 8 * i) * factors[i];
        b += word_at(data + 8 * i + 8) * factors[i + 1];
        c += word_at(data + 8 * i + 16) * factors[i + 2];
        d += word_at(data + 8 * i + 24) * factors[i + 3];
    }
    for (; i < count; i++)
        a += word_at(data + 8 * i) * factors[i];
    return a + b + c + d;
}

/* Return the contribution of `size` bytes at `offset` of a file to its checksum. factors: FACTORS of them. */
PLSC_API uint64_t plsc_checksum(const uint8_t *data, int64_t size, int64_t offset,
                                const uint64_t *factors) {
    uint64_t total = 0;
    while (size > 0) {
        int64_t word = offset / 8, inside = word % FACTORS, lead = offset % 8, taken;
        uint64_t sum;
        if (lead || size < 8) { /* part of a word, padded with zeros */
            uint8_t padded[8] = {0};
            taken = size < 8 - lead ? size : 8 - lead;
            memcpy(padded + lead, data, (size_t)taken);
            sum = weighted(padded, factors + inside, 1);
        } else {
            int64_t count = size / 8 < FACTORS - inside ? size / 8 : FACTORS - inside;
            taken = 8 * count;
            sum = weighted(data, factors + inside, count);
        }
        total += sum * (splitmix64((uint64_t)(word / FACTORS)) | 1);
        data += taken;
        offset += taken;
        size -= taken;
    }
    return total;
}

/* A file that is written from an offset, in pieces that end at multiples of CAPACITY. */
struct output {
    int handle;
    int64_t base;       /* offset of buffer[0] in the file, a multiple of CAPACITY */
    int64_t lead, fill; /* buffer[lead, fill) is not written yet */
    uint8_t *buffer;
    const uint64_t *factors; /* NULL: no checksum */
    uint64_t checksum;
};

/* Sum and write the buffered bytes; return 0 or errno. */
static int flush(struct output *out) {
    int64_t at = out->lead;
    if (out->factors)
        out->checksum +=
            plsc_checksum(out->buffer + at, out->fill - at, out->base + at, out->factors);
    while (at < out->fill) {
        ssize_t done = pwrite(out->handle, out->buffer + at, (size_t)(out->fill - at), out->base + at);
        if (done > 0)
            at += done;
        else if (done == 0 || errno != EINTR)
            return done < 0 ? errno : EIO;
    }
    out->base += out->fill == CAPACITY ? CAPACITY : 0;
    out->lead = out->fill %= CAPACITY;
    return 0;
}

static int put(struct output *out, const uint8_t *from, int64_t size) {
    while (size > 0) {
        int64_t room = CAPACITY - out->fill, some = size < room ? size : room;
        int error;
        memcpy(out->buffer + out->fill, from, (size_t)some);
        out->fill += some;
        from += some;
        size -= some;
        if (out->fill == CAPACITY && (error = flush(out)))
            return error;
    }
    return 0;
}

/* Put the lines order[0, count), each with a newline. Line i is lengths[i] bytes at places[i]. */
static int put_lines(struct output *out, const uint8_t *const *places, const int64_t *lengths,
                     const int64_t *order, int64_t count) {
    int error = 0;
    for (int64_t i = 0; i < count && !error; i++) {
        error = put(out, places[order[i]], lengths[order[i]]);
        if (!error)
            error = put(out, (const uint8_t *)"\n", 1);
    }
    return error ? error : flush(out);
}

static struct output output_at(int handle, int64_t offset, uint8_t *buffer, const uint64_t *factors) {
    int64_t lead = offset % CAPACITY;
    struct output out = {handle, offset - lead, lead, lead, buffer, factors, 0};
    return out;
}

/* Write lines to a file from `offset`. *checksum: their contribution to the file's checksum. Return 0 or
   errno. */
PLSC_API int64_t plsc_copy_lines(const uint8_t *const *places, const int64_t *lengths,
                                 const int64_t *order, int64_t count, int32_t handle, int64_t offset,
                                 const uint64_t *factors, uint64_t *checksum) {
    uint8_t *buffer = malloc((size_t)CAPACITY);
    struct output out = output_at(handle, offset, buffer, factors);
    int error = buffer ? put_lines(&out, places, lengths, order, count) : ENOMEM;
    *checksum = out.checksum;
    free(buffer);
    return error;
}

/* Write consecutive runs of lines to `files` pairs of files: counts[i] records of `record` bytes to
   handles[2 i] from offsets[2 i], and as many lines to handles[2 i + 1]. Return 0 or errno. */
PLSC_API int64_t plsc_spread_lines(const uint8_t *const *places, const int64_t *lengths,
                                   const int64_t *order, const uint8_t *records, int64_t record,
                                   const int64_t *counts, const int32_t *handles,
                                   const int64_t *offsets, int64_t files) {
    uint8_t *buffer = malloc((size_t)CAPACITY);
    int error = buffer ? 0 : ENOMEM;
    for (int64_t i = 0; i < files && !error; i++) {
        struct output heads = output_at(handles[2 * i], offsets[2 * i], buffer, NULL);
        struct output lines = output_at(handles[2 * i + 1], offsets[2 * i + 1], buffer, NULL);
        error = put(&heads, records, counts[i] * record);
        if (!error)
            error = flush(&heads);
        if (!error)
            error = put_lines(&lines, places, lengths, order, counts[i]);
        records += counts[i] * record;
        order += counts[i];
    }
    free(buffer);
    return error;
}
