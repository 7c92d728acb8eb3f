/* JSON lines with their labels, as long as each is a flat object of plain texts, numbers and constants
   (RFC 8259), the label a whole number or a text. What is not (escapes, bytes beyond ASCII, lists and objects
   in it, faults) is left to Python. */
#include "rows.h"

#define LONGEST_NUMBER 100

PLSC_API int64_t plsc_json_rows(const unsigned char *text, int64_t length, int64_t position,
                                const unsigned char *key, int64_t key_bytes, int64_t capacity,
                                int64_t *columns, int64_t *state);

struct value {
    const unsigned char *start, *end, *behind;
    int is_label; /* may be one: a text, or a whole number of 0 or more */
};

static const unsigned char *skip_blanks(const unsigned char *p, const unsigned char *end) {
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\r')) p++;
    return p;
}

/* The quote that ends the text whose first quote is at p; NULL if it is not plain. */
static const unsigned char *text_end(const unsigned char *p, const unsigned char *end) {
    const unsigned char *stop = find(++p, '"', end);
    unsigned char unusual = stop == end;
    for (; p < stop; p++) unusual |= ((signed char)*p < ' ') | (*p == '\\');
    return unusual ? NULL : stop;
}

static const unsigned char *skip_digits(const unsigned char *p, const unsigned char *end) {
    while (p < end && *p >= '0' && *p <= '9') p++;
    return p;
}

static int read_number(const unsigned char *p, const unsigned char *end, struct value *value) {
    const unsigned char *first, *q;
    value->start = p;
    value->is_label = *p != '-';
    if (*p == '-') p++;
    first = p;
    p = skip_digits(p, end);
    if (p == first || (*first == '0' && p - first > 1)) return 0;
    if (p - first > 18) value->is_label = 0;
    if (p < end && *p == '.') {
        value->is_label = 0;
        q = skip_digits(p + 1, end);
        if (q == p + 1) return 0;
        p = q;
    }
    if (p < end && (*p == 'e' || *p == 'E')) {
        value->is_label = 0;
        p++;
        if (p < end && (*p == '+' || *p == '-')) p++;
        q = skip_digits(p, end);
        if (q == p) return 0;
        p = q;
    }
    value->end = value->behind = p;
    return p - value->start <= LONGEST_NUMBER;
}

static int read_constant(const unsigned char *p, const unsigned char *end, struct value *value) {
    static const char *const constants[] = {"true", "false", "null"};
    for (int i = 0; i < 3; i++) {
        size_t bytes = strlen(constants[i]);
        if ((size_t)(end - p) >= bytes && memcmp(p, constants[i], bytes) == 0) {
            value->behind = p + bytes;
            return 1;
        }
    }
    return 0;
}

static int read_value(const unsigned char *p, const unsigned char *end, struct value *value) {
    value->is_label = 0;
    if (p == end) return 0;
    if (*p == '"') {
        value->start = p + 1;
        value->end = text_end(p, end);
        if (!value->end) return 0;
        value->behind = value->end + 1;
        value->is_label = 1;
        return 1;
    }
    if (*p == '-' || (*p >= '0' && *p <= '9')) return read_number(p, end, value);
    return read_constant(p, end, value);
}

/* Reads the object that fills a line; 0 if it is not usual, or lacks the label. */
static int read_object(const unsigned char *p, const unsigned char *end, const unsigned char *key,
                       size_t key_bytes, struct value *label) {
    int found = 0;
    p = skip_blanks(p, end);
    if (p == end || *p != '{') return 0;
    do {
        struct value value;
        p = skip_blanks(p + 1, end); /* behind the brace or the comma */
        if (p == end || *p != '"') return 0;
        const unsigned char *name = p + 1, *name_end = text_end(p, end);
        if (!name_end) return 0;
        p = skip_blanks(name_end + 1, end);
        if (p == end || *p != ':') return 0;
        p = skip_blanks(p + 1, end);
        if (!read_value(p, end, &value)) return 0;
        if ((size_t)(name_end - name) == key_bytes && memcmp(name, key, key_bytes) == 0) {
            if (!value.is_label) return 0;
            *label = value; /* of names that come twice the last one counts */
            found = 1;
        }
        p = skip_blanks(value.behind, end);
        if (p == end) return 0;
    } while (*p == ',');
    return found && *p == '}' && skip_blanks(p + 1, end) == end;
}

/* Finds rows from `position` on, where a line begins, until the text ends, `capacity` rows were found, or one
   is not usual. state: [0] where it stopped, behind the text's end or at a line's first byte; [1] the lines up to there. */
int64_t plsc_json_rows(const unsigned char *text, int64_t length, int64_t position,
                       const unsigned char *key, int64_t key_bytes, int64_t capacity,
                       int64_t *columns, int64_t *state) {
    struct rows rows = {text, columns, capacity, 0, 0};
    const unsigned char *p = text + position, *end = text + length;
    while (p <= end && rows.count < capacity) {
        struct value label;
        const unsigned char *stop = find(p, '\n', end);
        if (!all_blank(p, stop)) {
            if (!read_object(p, stop, key, (size_t)key_bytes, &label)) break;
            add_row(&rows, p, stop, label.start, label.end);
        }
        rows.line++;
        p = stop + 1;
    }
    state[0] = p - text;
    state[1] = rows.line;
    return rows.count;
}
