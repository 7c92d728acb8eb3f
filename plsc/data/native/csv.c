/* Rows of a CSV text with their labels, as long as they are sound and usual. What is not (a wrong number of
   fields, a quote inside a field, bytes beyond ASCII in a row with quotes) is left to Python, which says what
   it is or what is wrong with it. */
#include "rows.h"

#define LONGEST_FIELD (1 << 26)

PLSC_API int64_t plsc_csv_rows(const unsigned char *text, int64_t length, int64_t position,
                               int32_t separator, int64_t fields, int64_t label_field,
                               int64_t capacity, int64_t *columns, int64_t *state);

struct row {
    const unsigned char *end, *label, *label_end;
    int64_t fields, lines;
};

/* A row without quotes that ends at `end`, before the LF. */
static void read_plain(const unsigned char *p, const unsigned char *end, int separator,
                       int64_t label_field, struct row *row) {
    row->end = end;
    row->lines = 1;
    row->fields = 0;
    if (end > p && end[-1] == '\r') end--;
    for (;; p++, row->fields++) {
        const unsigned char *stop = find(p, separator, end);
        if (row->fields == label_field) {
            row->label = p;
            row->label_end = stop;
        }
        p = stop;
        if (stop == end) break;
    }
    row->fields++;
}

/* Whether a row ends at p: at a LF, or at the text's end, each perhaps behind a CR. */
static int is_row_end(const unsigned char *p, const unsigned char *end) {
    if (p < end && *p == '\r') p++;
    return p == end || *p == '\n';
}

/* The end of a field in quotes that begins at p; NULL for one that is not usual. */
static const unsigned char *read_quoted(const unsigned char *p, const unsigned char *end,
                                        int64_t *lines, int *has_doubled) {
    const unsigned char *start = ++p;
    for (;; p += 2) {
        p = find(p, '"', end);
        if (p == end) return NULL;
        if (p + 1 == end || p[1] != '"') break;
        *has_doubled = 1;
    }
    if (p - start > LONGEST_FIELD) return NULL;
    unsigned char unusual = 0;
    int64_t newlines = 0;
    for (const unsigned char *q = start; q < p; q++) {
        unusual |= (signed char)*q <= 0;
        newlines += *q == '\n';
    }
    *lines += newlines;
    return unusual ? NULL : p;
}

/* A row that has quotes; 0 if it is not usual. */
static int read_with_quotes(const unsigned char *p, const unsigned char *end, int separator,
                            int64_t label_field, struct row *row) {
    row->fields = 0;
    row->lines = 1;
    for (;; p++) {
        const unsigned char *from = p, *to;
        int has_doubled = 0;
        if (p < end && *p == '"') {
            to = read_quoted(p, end, &row->lines, &has_doubled);
            if (!to) return 0;
            from++;
            p = to + 1;
        } else {
            while (p < end && *p != separator && *p >= ' ' && *p < 0x80 && *p != '"') p++;
            to = p;
        }
        if (row->fields++ == label_field) {
            if (has_doubled) return 0;
            row->label = from;
            row->label_end = to;
        }
        if (p < end && *p == separator) continue;
        if (!is_row_end(p, end)) return 0;
        row->end = p < end && *p == '\r' ? p + 1 : p;
        return 1;
    }
}

/* Finds rows from `position` on, where a row begins, until the text ends, `capacity` rows were found, or one
   is not usual. state: [0] where it stopped, behind the text's end or at a row's first byte; [1] the lines up to there. */
int64_t plsc_csv_rows(const unsigned char *text, int64_t length, int64_t position,
                      int32_t separator, int64_t fields, int64_t label_field, int64_t capacity,
                      int64_t *columns, int64_t *state) {
    struct rows rows = {text, columns, capacity, 0, 0};
    const unsigned char *p = text + position, *end = text + length, *quote = find(p, '"', end);
    while (p <= end && rows.count < capacity) {
        struct row row = {0};
        const unsigned char *stop = find(p, '\n', end);
        if (quote < p) quote = find(p, '"', end);
        if (all_blank(p, stop)) {
            p = stop + 1;
            rows.line++;
            continue;
        }
        if (quote >= stop)
            read_plain(p, stop, separator, label_field, &row);
        else if (!read_with_quotes(p, end, separator, label_field, &row))
            break;
        if (row.fields != fields) break;
        add_row(&rows, p, row.end, row.label, row.label_end);
        rows.line += row.lines;
        p = row.end + 1;
    }
    state[0] = p - text;
    state[1] = rows.line;
    return rows.count;
}
