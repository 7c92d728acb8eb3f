/* Lines to and from the bucket files of a partition. The Python counterparts are in
   plsc/data/partition: buckets.py and frames.py, which tells what a frame is. */
#define _GNU_SOURCE
#include "copying.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

#define LONG 1024 /* bytes of a line from which on it is written from where it is */
#define BATCH 256 /* such lines written at once */

/* Sorts lines by their buckets. A line's bucket are the `bits` bits of its key after the first `above`.
   order: the lines, bucket by bucket. counts and bytes: of each bucket (1 << bits of them), its lines and
   their bytes, newlines included. Returns 0 if that is no number of bits. */
PLSC_API int32_t plsc_sort_to_buckets(const int64_t *numbers, const int64_t *lengths, int64_t count,
                                      uint64_t seed_key, int32_t above, int32_t bits, int64_t *order,
                                      int64_t *counts, int64_t *bytes) {
    if (bits < 0 || bits > 16 || above < 0 || above + bits > 64)
        return 0;
    int64_t buckets = (int64_t)1 << bits, next = 0;
    int shift = 64 - above - bits;
#define KEY(i) splitmix64((uint64_t)numbers[i] ^ seed_key)
#define BUCKET(i) (bits ? (KEY(i) >> shift) & (uint64_t)(buckets - 1) : 0)
    memset(counts, 0, (size_t)buckets * sizeof *counts);
    memset(bytes, 0, (size_t)buckets * sizeof *bytes);
    for (int64_t i = 0; i < count; i++) {
        uint64_t bucket = BUCKET(i);
        counts[bucket]++;
        bytes[bucket] += lengths[i] + 1;
    }
    for (int64_t bucket = 0; bucket < buckets; bucket++) { /* counts become places for a while */
        int64_t here = counts[bucket];
        counts[bucket] = next;
        next += here;
    }
    for (int64_t i = 0; i < count; i++)
        order[counts[BUCKET(i)]++] = i;
    for (int64_t bucket = buckets - 1; bucket > 0; bucket--)
        counts[bucket] -= counts[bucket - 1];
#undef BUCKET
#undef KEY
    return 1;
}

static int put_head(struct output *out, const struct lines *lines, const int64_t *numbers,
                    const int64_t *chosen, int64_t count) {
    uint64_t head = little_endian((uint64_t)count);
    if (!put(out, &head, 8))
        return 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t number = little_endian((uint64_t)numbers[chosen[i]]);
        if (!put(out, &number, 8))
            return 0;
    }
    for (int64_t i = 0; i < count; i++) {
        uint64_t length = (uint64_t)lines->lengths[chosen[i]] + 1;
        uint8_t bytes[4] = {length & 255, length >> 8 & 255, length >> 16 & 255, length >> 24 & 255};
        if (length > UINT32_MAX)
            return fail(out->outcome, OUTSIDE, 0);
        if (!put(out, bytes, 4))
            return 0;
    }
    return 1;
}

/* Writes all of the pieces, which it changes, at an offset of a file. */
static int write_pieces(struct output *out, struct iovec *pieces, int count, int64_t offset) {
    while (count > 0) {
        ssize_t done = pwritev(out->handle, pieces, count, offset);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return fail(out->outcome, CANNOT_WRITE, done < 0 ? errno : EIO);
        offset += done;
        while (count > 0 && (size_t)done >= pieces->iov_len) {
            done -= (ssize_t)pieces->iov_len;
            pieces++, count--;
        }
        if (count > 0) {
            pieces->iov_base = (uint8_t *)pieces->iov_base + done;
            pieces->iov_len -= (size_t)done;
        }
    }
    return 1;
}

/* Writes lines from where they are, without putting them together first: for lines that are not short. */
static int write_lines(struct output *out, const struct lines *lines, const int64_t *chosen,
                       int64_t count) {
    static uint8_t newline = '\n';
    struct iovec pieces[2 * BATCH];
    int64_t offset = out->base + out->fill; /* all before it is written */
    for (int64_t i = 0; i < count;) {
        int64_t size = 0;
        int used = 0;
        for (int batch = 0; batch < BATCH && i < count; batch++, i++) {
            const uint8_t *line = line_at(out, lines, chosen[i]);
            if (line == NULL)
                return 0;
            size_t length = (size_t)lines->lengths[chosen[i]];
            pieces[used++] = (struct iovec){(void *)line, length};
            pieces[used++] = (struct iovec){&newline, 1};
            size += (int64_t)length + 1;
        }
        if (!write_pieces(out, pieces, used, offset))
            return 0;
        offset += size;
    }
    return 1;
}

static int put_frame(struct output *out, const struct lines *lines, const int64_t *numbers,
                     const int64_t *chosen, int64_t count) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; i++) {
        if (chosen[i] < 0 || chosen[i] >= lines->count)
            return fail(out->outcome, OUTSIDE, 0);
        bytes += lines->lengths[chosen[i]];
    }
    if (!put_head(out, lines, numbers, chosen, count))
        return 0;
    if (bytes / count >= LONG)
        return flush(out) && write_lines(out, lines, chosen, count);
    for (int64_t i = 0; i < count; i++)
        if (!put_line(out, lines, chosen[i]))
            return 0;
    return flush(out);
}

/* Writes a frame to each bucket that lines go to, at its offset. order and
   counts are those of plsc_sort_to_buckets. */
PLSC_API void plsc_write_frames(const struct lines *lines, const int64_t *numbers, const int64_t *order,
                                const int64_t *counts, int64_t buckets, const int32_t *handles,
                                const int64_t *offsets, struct outcome *outcome) {
    struct output out = {.direct = -1, .outcome = outcome};
    int64_t done = 0;
    memset(outcome, 0, sizeof *outcome);
    for (int64_t bucket = 0; bucket < buckets; bucket++) {
        if (counts[bucket] == 0)
            continue;
        if (counts[bucket] < 0 || counts[bucket] > lines->count - done) {
            fail(outcome, OUTSIDE, 0);
            break;
        }
        if (!open_output(&out, handles[bucket], offsets[bucket]) ||
            !put_frame(&out, lines, numbers, order + done, counts[bucket]))
            break;
        done += counts[bucket];
    }
    free(out.buffer);
}

static int64_t read_frames(const uint8_t *data, int64_t size, int64_t room, int64_t *numbers,
                           int64_t *starts, int64_t *lengths) {
    int64_t at = 0, found = 0;
    while (at < size) {
        if (size - at < 8)
            return -1;
        uint64_t count = word_at(data + at);
        at += 8;
        if (count > (uint64_t)(room - found) || (int64_t)count > (size - at) / 12)
            return -1;
        const uint8_t *number = data + at, *length = number + 8 * count;
        at += 12 * (int64_t)count;
        for (uint64_t i = 0; i < count; i++, found++) {
            const uint8_t *four = length + 4 * i;
            int64_t bytes = four[0] | four[1] << 8 | four[2] << 16 | (int64_t)four[3] << 24;
            if (bytes < 1 || bytes > size - at)
                return -1;
            numbers[found] = (int64_t)word_at(number + 8 * i);
            starts[found] = at;
            lengths[found] = bytes - 1;
            at += bytes;
        }
    }
    return found;
}

/* Finds the lines in the frames of a bucket: their numbers, starts, and lengths without the newline, each
   output with room for `room`. Returns how many, -1 if these are not whole frames. */
PLSC_API int64_t plsc_read_frames(const uint8_t *data, int64_t size, int64_t room, int64_t *numbers,
                                  int64_t *starts, int64_t *lengths) {
    sigjmp_buf here;
    volatile int64_t found = -1;
    if (sigsetjmp(here, 1) == 0) {
        way_out = &here;
        found = read_frames(data, size, room, numbers, starts, lengths);
    }
    way_out = NULL;
    return found;
}
