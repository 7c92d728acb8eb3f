/* Read many small files, or many ranges of open files, in one call: the interpreter lock is released once for
   all of them, not several times for each. Errors are not reported here: what cannot be read is marked with
   -1, and the caller reads it again in Python, which reports the error. */
#define _GNU_SOURCE
#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#if !defined(O_PATH)
#define O_PATH O_RDONLY /* outside Linux */
#endif

PLSC_API int64_t plsc_read_files(const char *folder, int64_t may_leave, const char *text,
                                 const int64_t *ends, int64_t paths, const int64_t *chosen,
                                 int64_t count, unsigned char *buffer, int64_t capacity,
                                 int64_t *sizes);
PLSC_API int64_t plsc_read_ranges(const int32_t *descriptors, const int64_t *offsets,
                                  const int64_t *lengths, int64_t count, unsigned char *buffer,
                                  int64_t capacity, int64_t *sizes);
PLSC_API int64_t plsc_move_blocks(int64_t descriptor, int64_t is_write, const int64_t *numbers, int64_t count,
                                  int64_t size, unsigned char *data);

static int read_whole(int descriptor, unsigned char *to, int64_t length, int64_t offset) {
    while (length > 0) {
        ssize_t got = pread(descriptor, to, (size_t)length, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return 0;
        to += got;
        length -= got;
        offset += got;
    }
    return 1;
}

/* Open a file below a folder; -1 if links lead out of it, unless they may. Without O_NONBLOCK, opening a named
   pipe would block. Before Linux 5.6, on other systems, and for absolute links,
   Python opens the file. */
static int open_below(int folder, const char *name, int may_leave) {
    struct {
        uint64_t flags, mode, resolve;
    } how = {O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0, 8 /* RESOLVE_BENEATH */};
    if (may_leave) return openat(folder, name, (int)how.flags);
#if defined(__linux__)
    return (int)syscall(437 /* openat2 */, folder, name, &how, sizeof how);
#else
    return -1;
#endif
}

/* Return the size of the open file, now at `to`; -1 if it cannot be read in one go; -2 if it exceeds `room`. */
static int64_t read_file(int descriptor, unsigned char *to, int64_t room) {
    struct stat status;
    int64_t result = -1;
    if (descriptor < 0) return -1;
    if (fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode) && status.st_size > 0) {
        if (status.st_size > room)
            result = -2;
        else if (read_whole(descriptor, to, (int64_t)status.st_size, 0))
            result = (int64_t)status.st_size;
    }
    close(descriptor);
    return result;
}

/* Read the files `chosen` [count] of a table of paths below a folder: path i is text[ends[i]..ends[i + 1]).
   They are stored consecutively in the buffer. sizes [count]: their bytes, or -1. Return how many of the
   chosen files were processed, fewer than `count` if the buffer is full. */
int64_t plsc_read_files(const char *folder, int64_t may_leave, const char *text, const int64_t *ends,
                        int64_t paths, const int64_t *chosen, int64_t count, unsigned char *buffer,
                        int64_t capacity, int64_t *sizes) {
    char path[PATH_MAX];
    int64_t used = 0, i;
    int root = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
    for (i = 0; i < count; i++) {
        sizes[i] = -1;
        if (root < 0 || chosen[i] < 0 || chosen[i] >= paths) continue;
        const char *name = text + ends[chosen[i]];
        int64_t length = ends[chosen[i] + 1] - ends[chosen[i]];
        if (length <= 0 || length >= (int64_t)sizeof path || name[0] == '/' || memchr(name, 0, (size_t)length))
            continue;
        memcpy(path, name, (size_t)length);
        path[length] = 0;
        int64_t size = read_file(open_below(root, path, may_leave != 0), buffer + used, capacity - used);
        if (size == -2) {
            if (used) break;
            continue; /* larger than the whole buffer */
        }
        sizes[i] = size;
        if (size > 0) used += size;
    }
    if (root >= 0) close(root);
    return i;
}

/* Do the same for ranges of open files: lengths[i] bytes at offsets[i] of descriptors[i]. */
int64_t plsc_read_ranges(const int32_t *descriptors, const int64_t *offsets, const int64_t *lengths,
                         int64_t count, unsigned char *buffer, int64_t capacity, int64_t *sizes) {
    int64_t used = 0;
    for (int64_t i = 0; i < count; i++) {
        sizes[i] = -1;
        if (descriptors[i] < 0 || offsets[i] < 0 || lengths[i] <= 0) continue;
        if (lengths[i] > capacity - used) {
            if (used) return i;
            continue;
        }
        if (!read_whole(descriptors[i], buffer + used, lengths[i], offsets[i])) continue;
        sizes[i] = lengths[i];
        used += lengths[i];
    }
    return count;
}

/* Read or write the blocks numbers[i] of a file; they are stored consecutively in data. Return 0 or -errno. */
int64_t plsc_move_blocks(int64_t descriptor, int64_t is_write, const int64_t *numbers, int64_t count,
                         int64_t size, unsigned char *data) {
    for (int64_t i = 0; i < count; i++) {
        for (int64_t done = 0; done < size;) {
            unsigned char *at = data + i * size + done;
            size_t left = (size_t)(size - done);
            off_t offset = (off_t)(numbers[i] * size + done);
            ssize_t moved = is_write ? pwrite((int)descriptor, at, left, offset)
                                     : pread((int)descriptor, at, left, offset);
            if (moved < 0 && errno == EINTR) continue;
            if (moved <= 0) return moved < 0 ? -errno : -EIO;
            done += moved;
        }
    }
    return 0;
}
