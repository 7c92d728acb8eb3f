/* The copying of a partition: lines to the parts in their new order, to and from bucket files, and the
   checksum. The Python counterparts are in plsc/data/partition: checksum.py, copying.py, buckets.py. */
#define _GNU_SOURCE
#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define FACTORS 32768 /* _WORDS of checksum.py */
#define CAPACITY ((int64_t)FACTORS * 8) /* put together, summed and written while it is in the cache */
#define LONG 1024 /* bytes of a line from which on it is written from where it is */
#define BATCH 256 /* such lines written at once */

enum { DONE, NO_MEMORY, CANNOT_WRITE, CUT_SHORT, OUTSIDE };

static uint64_t splitmix64(uint64_t value) {
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

/* The sum of `count` words, each times its factor. Compilers make of 64-bit products in vectors something
   slower than the scalar ones. */
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

/* What `size` bytes at `offset` of a file add to its checksum. factors: FACTORS of them. */
PLSC_API uint64_t plsc_checksum(const uint8_t *data, int64_t size, int64_t offset,
                                const uint64_t *factors) {
    uint64_t total = 0;
    while (size > 0) {
        int64_t word = offset / 8, inside = word % FACTORS, lead = offset % 8, taken;
        uint64_t sum;
        if (lead || size < 8) { /* a part of a word, zeros around it */
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
    int64_t base; /* offset of buffer[0] in the file, a multiple of CAPACITY */
    int64_t lead, fill; /* buffer[lead, fill) waits to be written */
    uint8_t *buffer;
    const uint64_t *factors; /* NULL: no checksum is wanted */
    struct outcome *outcome;
};

static int fail(struct outcome *outcome, int status, int error) {
    outcome->status = status;
    outcome->error = error;
    return 0;
}

static int open_output(struct output *out, int handle, int64_t offset) {
    out->handle = handle;
    out->base = offset - offset % CAPACITY;
    out->lead = out->fill = offset % CAPACITY;
    if (out->buffer == NULL)
        out->buffer = malloc((size_t)CAPACITY);
    return out->buffer != NULL || fail(out->outcome, NO_MEMORY, ENOMEM);
}

static int flush(struct output *out) {
    int64_t at = out->lead;
    if (out->factors)
        out->outcome->checksum += plsc_checksum(out->buffer + out->lead, out->fill - out->lead,
                                                out->base + out->lead, out->factors);
    while (at < out->fill) {
        ssize_t done = pwrite(out->handle, out->buffer + at, (size_t)(out->fill - at), out->base + at);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return fail(out->outcome, CANNOT_WRITE, done < 0 ? errno : EIO);
        at += done;
    }
    if (out->fill == CAPACITY) {
        out->base += CAPACITY;
        out->fill = 0;
    }
    out->lead = out->fill;
    return 1;
}

static int put(struct output *out, const void *data, int64_t size) {
    const uint8_t *from = data;
    while (size > 0) {
        int64_t room = CAPACITY - out->fill, some = size < room ? size : room;
        memcpy(out->buffer + out->fill, from, (size_t)some);
        out->fill += some;
        from += some;
        size -= some;
        if (out->fill == CAPACITY && !flush(out))
            return 0;
    }
    return 1;
}

/* Where a line is; NULL, and the outcome says so, if that is outside of its memory. */
static const uint8_t *line_at(struct output *out, const struct lines *lines, int64_t line) {
    out->outcome->line = line;
    if (line >= 0 && line < lines->count) {
        int64_t start = lines->starts[line], length = lines->lengths[line];
        int32_t file = lines->files ? lines->files[line] : 0;
        if (file >= 0 && file < lines->memory_count && start >= 0 && length >= 0 &&
            length <= lines->sizes[file] && start <= lines->sizes[file] - length)
            return lines->memories[file] + start;
    }
    fail(out->outcome, OUTSIDE, 0);
    return NULL;
}

static int put_line(struct output *out, const struct lines *lines, int64_t line) {
    static const uint8_t newline = '\n';
    const uint8_t *at = line_at(out, lines, line);
    return at && put(out, at, lines->lengths[line]) && put(out, &newline, 1);
}

/* A mapped file that is cut short while it is read raises SIGBUS. A thread that has a way out takes it;
   for others the signal means what it meant before. */
static __thread sigjmp_buf *volatile way_out;
static struct sigaction before;

static void on_sigbus(int number) {
    if (way_out)
        siglongjmp(*way_out, 1);
    sigaction(number, &before, NULL); /* the faulty instruction is run again */
}

/* Has plsc_copy_lines and plsc_read_frames tell of files that were cut short, or no more. Calls come in pairs, one at a time. */
PLSC_API void plsc_catch_truncation(int32_t is_on) {
    struct sigaction action = {.sa_handler = on_sigbus};
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, is_on ? &action : &before, is_on ? &before : NULL);
}

/* Writes the lines order[0, count), each with a newline, to `handle` from `offset` on. */
PLSC_API void plsc_copy_lines(const struct lines *lines, const int64_t *order, int64_t count, int32_t handle,
                              int64_t offset, const uint64_t *factors, struct outcome *outcome) {
    struct output out = {.factors = factors, .outcome = outcome};
    sigjmp_buf here;
    memset(outcome, 0, sizeof *outcome);
    if (!open_output(&out, handle, offset))
        return;
    uint8_t *volatile buffer = out.buffer;
    if (sigsetjmp(here, 1) == 0) {
        way_out = &here;
        for (int64_t i = 0; i < count; i++)
            if (!put_line(&out, lines, order[i]))
                break;
        if (outcome->status == DONE)
            flush(&out);
    } else {
        fail(outcome, CUT_SHORT, 0);
    }
    way_out = NULL;
    free(buffer);
}

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
#define BUCKET(i) (bits ? (splitmix64((uint64_t)numbers[i] ^ seed_key) >> shift) & (uint64_t)(buckets - 1) : 0)
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

/* Writes a frame (buckets.py tells what that is) to each bucket that lines go to, at its offset. order and
   counts are those of plsc_sort_to_buckets. */
PLSC_API void plsc_write_frames(const struct lines *lines, const int64_t *numbers, const int64_t *order,
                                const int64_t *counts, int64_t buckets, const int32_t *handles,
                                const int64_t *offsets, struct outcome *outcome) {
    struct output out = {.outcome = outcome};
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

/* Begins to bring bytes of a file to the disk, and does not wait for them: the fsync at the end finds less
   to do. */
PLSC_API void plsc_start_writeback(int32_t handle, int64_t offset, int64_t size) {
#ifdef SYNC_FILE_RANGE_WRITE
    (void)sync_file_range(handle, offset, size, SYNC_FILE_RANGE_WRITE);
#else
    (void)handle, (void)offset, (void)size;
#endif
}
