/* What the passes over CSV files and JSON lines share: the rows that they find, and labels of digits. */
#ifndef PLSC_DATA_ROWS_H
#define PLSC_DATA_ROWS_H

#include "native.h"

#include <string.h>

/* One column of numbers for each of these, `capacity` apart: the row's first byte in the text, its bytes, its
   first line (the text's first is 0), the label's first byte and bytes, its number or -1. */
enum { ROW_START, ROW_BYTES, ROW_LINE, LABEL_START, LABEL_BYTES, LABEL_NUMBER, ROW_COLUMNS };

struct rows {
    const unsigned char *text;
    int64_t *columns;
    int64_t capacity, count, line;
};

static inline int is_blank(unsigned char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

static inline int all_blank(const unsigned char *p, const unsigned char *end) {
    while (p < end && is_blank(*p)) p++;
    return p == end;
}

static inline const unsigned char *find(const unsigned char *p, int c, const unsigned char *end) {
    const unsigned char *found = p < end ? memchr(p, c, (size_t)(end - p)) : NULL;
    return found ? found : end;
}

/* The number in a text of 1 to 18 digits, blanks around them allowed; -1 for any other text. */
static inline int64_t whole_number(const unsigned char *p, const unsigned char *end) {
    int64_t number = 0;
    while (p < end && (*p == ' ' || *p == '\t')) p++;
    while (p < end && (end[-1] == ' ' || end[-1] == '\t')) end--;
    if (p == end || end - p > 18) return -1;
    for (; p < end; p++) {
        if (*p < '0' || *p > '9') return -1;
        number = 10 * number + (*p - '0');
    }
    return number;
}

static inline void add_row(struct rows *rows, const unsigned char *start, const unsigned char *end,
                           const unsigned char *label, const unsigned char *label_end) {
    int64_t *to = rows->columns + rows->count++;
    to[ROW_START * rows->capacity] = start - rows->text;
    to[ROW_BYTES * rows->capacity] = end - start;
    to[ROW_LINE * rows->capacity] = rows->line;
    to[LABEL_START * rows->capacity] = label - rows->text;
    to[LABEL_BYTES * rows->capacity] = label_end - label;
    to[LABEL_NUMBER * rows->capacity] = whole_number(label, label_end);
}

#endif
