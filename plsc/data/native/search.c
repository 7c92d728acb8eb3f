/* The lines of a mapped file, found, checked and summed in one pass, as long as they are usual. The Python
   counterpart is plsc/data/line_reader.py. */
#define _GNU_SOURCE
#include "copying.h"
#include "lines.h"

#include <sys/mman.h>

/* Where the search for lines in a mapped file is. */
struct search {
    const uint8_t *data;
    int64_t position; /* up to where it has been searched and summed */
    int64_t line;     /* where the line begins that is open there */
    int64_t end;      /* where a line ends, or the file, its last newline perhaps missing */
    int64_t longest;  /* bytes that a line may have */
    uint64_t checksum;
    int64_t blanks; /* lines left out */
    int64_t *starts, *ends;
    int64_t count, room; /* of those two */
};

/* Takes the line that ends at `end`; returns 0 if the naive reader must see it. */
static int take_line(struct search *s, int64_t end) {
    int64_t label, start = s->line;
    if (end > start && s->data[end - 1] == '\r')
        end--;
    if (end == start) {
        s->blanks++;
        return 1;
    }
    if (end - start > s->longest || read_label(s->data, start, end, &label) < 0)
        return 0;
    s->starts[s->count] = start;
    s->ends[s->count++] = end;
    return 1;
}

static int search_lines(struct search *s, const uint64_t *factors) {
    if (s->position == 0 && s->end >= 3 && memcmp(s->data, "\xEF\xBB\xBF", 3) == 0)
        s->line = 3; /* behind the byte order mark */
    while (s->position < s->end && s->count < s->room) {
        int64_t begin = s->position, stop = begin + CAPACITY < s->end ? begin + CAPACITY : s->end;
        while (s->position < stop && s->count < s->room) {
            const uint8_t *at = s->data + s->position, *hit = memchr(at, '\n', (size_t)(stop - s->position));
            s->position = hit ? hit - s->data + 1 : stop;
            if (hit && !take_line(s, s->position - 1))
                return 0;
            s->line = hit ? s->position : s->line;
        }
        s->checksum += plsc_checksum(s->data + begin, s->position - begin, begin, factors);
    }
    if (s->position == s->end && s->line < s->end && s->count < s->room) { /* the last newline is missing */
        if (!take_line(s, s->end))
            return 0;
        s->line = s->end;
    }
    return 1;
}

/* Goes on with a search until `end` or until there are `room` lines. Returns 0 if there is something unusual:
   a line that the naive reader must see, or a file that was cut short (plsc_catch_truncation). */
PLSC_API int32_t plsc_search_lines(struct search *search, const uint64_t *factors) {
    sigjmp_buf here;
    volatile int32_t is_usual = 0;
    if (sigsetjmp(here, 1) == 0) {
        way_out = &here;
        is_usual = search_lines(search, factors);
    }
    way_out = NULL;
    return is_usual;
}

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#endif

/* Has bytes of a mapped file read and mapped all at once, not page by page; a hint. */
PLSC_API void plsc_populate(const uint8_t *data, int64_t size) {
    uintptr_t page = 4096, first = (uintptr_t)data / page * page;
    size_t length = (size_t)((uintptr_t)data + (uintptr_t)size - first);
    (void)madvise((void *)first, length, MADV_WILLNEED);
    (void)madvise((void *)first, length, MADV_POPULATE_READ);
}
