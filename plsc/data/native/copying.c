/* The copying of a partition: lines to the parts in their new order, and the checksum. The Python
   counterparts are in plsc/data/partition: checksum.py and copying.py. */
#define _GNU_SOURCE
#include "copying.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

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

int fail(struct outcome *outcome, int status, int error) {
    outcome->status = status;
    outcome->error = error;
    return 0;
}

int open_output(struct output *out, int handle, int64_t offset) {
    out->handle = handle;
    out->base = offset - offset % CAPACITY;
    out->lead = out->fill = offset % CAPACITY;
    if (out->buffer == NULL)
        out->buffer = aligned_alloc(BLOCK, (size_t)CAPACITY);
    return out->buffer != NULL || fail(out->outcome, NO_MEMORY, ENOMEM);
}

/* Writes buffer[begin, end) to a handle of the file. Returns where it ended, and in errno why it was not at
   `end`. */
static int64_t write_some(struct output *out, int handle, int64_t begin, int64_t end) {
    while (begin < end) {
        ssize_t done = pwrite(handle, out->buffer + begin, (size_t)(end - begin), out->base + begin);
        if (done > 0) {
            begin += done;
        } else if (done == 0 || errno != EINTR) {
            errno = done < 0 ? errno : EIO;
            break;
        }
    }
    return begin;
}

/* Whole blocks go past the system's cache, if that can be and there are many: no copy of them is made, and
   nothing is left to be brought to the disk later. Whatever fails there is tried the usual way. */
static int write_buffer(struct output *out) {
    int64_t at = out->lead, first = (at + BLOCK - 1) / BLOCK * BLOCK, last = out->fill / BLOCK * BLOCK;
    if (out->direct >= 0 && last - first >= CAPACITY / 2) {
        at = write_some(out, out->handle, at, first);
        if (at == first)
            at = write_some(out, out->direct, first, last);
        if (at < last)
            out->direct = -1;
    }
    if (write_some(out, out->handle, at, out->fill) < out->fill)
        return fail(out->outcome, CANNOT_WRITE, errno);
    return 1;
}

int flush(struct output *out) {
    if (out->factors)
        out->outcome->checksum += plsc_checksum(out->buffer + out->lead, out->fill - out->lead,
                                                out->base + out->lead, out->factors);
    if (!write_buffer(out))
        return 0;
    if (out->fill == CAPACITY) {
        out->base += CAPACITY;
        out->fill = 0;
    }
    out->lead = out->fill;
    return 1;
}

int put(struct output *out, const void *data, int64_t size) {
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

const uint8_t *line_at(struct output *out, const struct lines *lines, int64_t line) {
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

int put_line(struct output *out, const struct lines *lines, int64_t line) {
    static const uint8_t newline = '\n';
    const uint8_t *at = line_at(out, lines, line);
    return at && put(out, at, lines->lengths[line]) && put(out, &newline, 1);
}

/* A mapped file that is cut short while it is read raises SIGBUS. A thread that has a way out takes it;
   for others the signal means what it meant before. */
__thread sigjmp_buf *volatile way_out;
static struct sigaction before;

static void on_sigbus(int number) {
    if (way_out)
        siglongjmp(*way_out, 1);
    sigaction(number, &before, NULL); /* the faulty instruction is run again */
}

/* Has plsc_copy_lines and plsc_read_frames tell of files that were cut short, until as many calls with 0 as
   with 1 have come. */
PLSC_API void plsc_catch_truncation(int32_t is_on) {
    static int users;
    struct sigaction action = {.sa_handler = on_sigbus};
    sigemptyset(&action.sa_mask);
    if (is_on && __atomic_fetch_add(&users, 1, __ATOMIC_SEQ_CST) == 0)
        sigaction(SIGBUS, &action, &before);
    if (!is_on && __atomic_sub_fetch(&users, 1, __ATOMIC_SEQ_CST) == 0)
        sigaction(SIGBUS, &before, NULL);
}

/* Writes the lines order[0, count), each with a newline, to `handle` from `offset` on. direct: the same file,
   opened with O_DIRECT; -1 without. */
PLSC_API void plsc_copy_lines(const struct lines *lines, const int64_t *order, int64_t count, int32_t handle,
                              int32_t direct, int64_t offset, const uint64_t *factors,
                              struct outcome *outcome) {
    struct output out = {.direct = direct, .factors = factors, .outcome = outcome};
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

/* Begins to bring bytes of a file to the disk, and does not wait for them: the fsync at the end finds less
   to do. */
PLSC_API void plsc_start_writeback(int32_t handle, int64_t offset, int64_t size) {
#ifdef SYNC_FILE_RANGE_WRITE
    (void)sync_file_range(handle, offset, size, SYNC_FILE_RANGE_WRITE);
#else
    (void)handle, (void)offset, (void)size;
#endif
}
