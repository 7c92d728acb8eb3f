/* Samples in a piece of a tar archive (WebDataset: members whose names differ behind the first dot), as long
   as they are usual: plain members with short names, perhaps with pax remarks that change neither name nor
   size, one image, and a label. What is not is left to Python. See tar_format.py for the format. */
#include "rows.h"

#define BLOCK 512
#define MOST_MEMBERS 16
#define LONGEST_LABEL (1 << 20)

/* One column of numbers for each, `capacity` apart. Offsets are in the archive, starts in the piece. The label
   is the text of the member, without blanks around it; its number is -1 if it is none, -2 if it is JSON. */
enum { IMAGE_OFFSET, IMAGE_BYTES, KEY_START, KEY_BYTES, TEXT_START, TEXT_BYTES, TEXT_NUMBER };

PLSC_API int64_t plsc_tar_samples(const unsigned char *piece, int64_t length, int64_t offset,
                                  int64_t size, const char *image, const char *label,
                                  int64_t capacity, int64_t *columns, int64_t *state);

struct span {
    const unsigned char *start;
    int64_t bytes;
};

struct member {
    struct span key, suffix;
    int64_t content, bytes, behind; /* in the piece: its content, and what follows */
};

struct sample {
    struct span key, suffixes[MOST_MEMBERS], label, json;
    int64_t start, members, images, image_start, image_bytes;
    int has_label, has_json;
};

static int lower(int c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; }

static int is_word(struct span span, const char *word) {
    int64_t i = 0;
    for (; i < span.bytes && word[i]; i++)
        if (lower(span.start[i]) != word[i]) return 0;
    return i == span.bytes && !word[i];
}

static int same(struct span a, struct span b) {
    if (a.bytes != b.bytes) return 0;
    for (int64_t i = 0; i < a.bytes; i++)
        if (lower(a.start[i]) != lower(b.start[i])) return 0;
    return 1;
}

/* A number in octal digits, with blanks or zeros around them; -1 for anything else. */
static int64_t octal(const unsigned char *field, int bytes) {
    int64_t number = 0;
    int i = 0, digits = 0;
    while (i < bytes && (field[i] == ' ' || field[i] == 0)) i++;
    for (; i < bytes && field[i] >= '0' && field[i] <= '7'; i++, digits++)
        number = 8 * number + (field[i] - '0');
    while (i < bytes && (field[i] == ' ' || field[i] == 0)) i++;
    return digits && i == bytes ? number : -1;
}

static int sum_is_right(const unsigned char *header) {
    int64_t sum = 0;
    for (int i = 0; i < BLOCK; i++) sum += header[i];
    for (int i = 148; i < 156; i++) sum += ' ' - header[i];
    return octal(header + 148, 8) == sum;
}

/* Whether pax remarks, "<length> <key>=<value>\n" each, change nothing that matters here. */
static int are_remarks_idle(const unsigned char *p, int64_t bytes) {
    const unsigned char *end = p + bytes;
    while (p < end) {
        int64_t length = 0;
        const unsigned char *q = p, *equals;
        for (; q < end && q - p < 7 && *q >= '0' && *q <= '9'; q++)
            length = 10 * length + (*q - '0');
        if (q == p || q == end || *q != ' ' || length <= q - p || length > end - p) return 0;
        if (p[length - 1] != '\n') return 0;
        q++;
        equals = find(q, '=', p + length - 1);
        if (equals == p + length - 1) return 0;
        struct span key = {q, equals - q};
        if (is_word(key, "path") || is_word(key, "size")) return 0;
        if (key.bytes >= 4 && memcmp(q, "GNU.", 4) == 0) return 0;
        p += length;
    }
    return 1;
}

/* Splits a name at the first dot behind the last slash. 0: not usual; 1: done; 2: hidden, or without a dot. */
static int split_name(const unsigned char *name, int64_t bytes, struct member *member) {
    const unsigned char *end = name + bytes, *base = name, *dot;
    while (end - name > 2 && name[0] == '.' && name[1] == '/') name += 2;
    if (name == end || *name == '/' || *name == '.' || end[-1] == '/') return 0;
    base = name;
    for (const unsigned char *p = name; p < end; p++)
        if (*p == '/') {
            if (p[1] == '.' || p[1] == '/') return 0;
            base = p + 1;
        }
    dot = find(base, '.', end);
    if (dot == base || dot == end) return 2;
    member->key = (struct span){name, dot - name};
    member->suffix = (struct span){dot + 1, end - dot - 1};
    for (const unsigned char *p = dot; p < end; p++)
        if (*p >= 0x80) return 0;
    return 1;
}

/* Reads the headers at `at`. 0: not usual; 1: a member; 2: one to pass over; -1: they are not all here. */
static int read_member(const unsigned char *piece, int64_t length, int64_t at, int64_t left,
                       struct member *member) {
    for (;;) {
        const unsigned char *header = piece + at;
        if (at + BLOCK > length) return -1;
        int64_t bytes = octal(header + 124, 12);
        int kind = header[156];
        if (bytes < 0 || !sum_is_right(header)) return 0;
        int64_t padded = (bytes + BLOCK - 1) / BLOCK * BLOCK;
        if (padded > left - at - BLOCK) return 0;
        if (kind == 'x' || kind == 'g') {
            if (at + BLOCK + padded > length) return -1;
            if (kind == 'x' && !are_remarks_idle(header + BLOCK, bytes)) return 0;
            if (bytes > LONGEST_LABEL) return 0;
            at += BLOCK + padded;
            continue;
        }
        if (kind != '0' && kind != 0 && kind != '7') return 0;
        if (memcmp(header + 257, "ustar", 6) == 0 && header[345]) return 0;
        member->content = at + BLOCK;
        member->bytes = bytes;
        member->behind = at + BLOCK + padded;
        return split_name(header, find(header, 0, header + 100) - header, member);
    }
}

static int is_image(struct span suffix, const char *image) {
    static const char *const endings[] = {"jpg", "jpeg", "png",  "bmp", "gif",
                                          "tif", "tiff", "webp", "ppm", "pgm"};
    if (*image) return is_word(suffix, image);
    for (int64_t i = suffix.bytes - 1; i >= 0; i--)
        if (suffix.start[i] == '.') {
            suffix.start += i + 1;
            suffix.bytes -= i + 1;
            break;
        }
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
        if (is_word(suffix, endings[i])) return 1;
    return 0;
}

/* Adds a member to its sample; 0 if it is not usual there, -1 if its text is not all here. */
static int add_member(struct sample *sample, const struct member *member,
                      const unsigned char *piece, int64_t length, const char *image,
                      const char *label) {
    if (sample->members == MOST_MEMBERS) return 0;
    for (int64_t i = 0; i < sample->members; i++)
        if (same(sample->suffixes[i], member->suffix)) return 0;
    sample->suffixes[sample->members++] = member->suffix;
    if (is_image(member->suffix, image)) {
        sample->images++;
        sample->image_start = member->content;
        sample->image_bytes = member->bytes;
    }
    int has_label = is_word(member->suffix, label), has_json = is_word(member->suffix, "json");
    if (!has_label && !has_json) return 1;
    if (member->bytes > LONGEST_LABEL) return 0;
    if (member->content + member->bytes > length) return -1;
    struct span text = {piece + member->content, member->bytes};
    if (has_label) sample->label = text;
    if (has_json) sample->json = text;
    sample->has_label |= has_label;
    sample->has_json |= has_json;
    return 1;
}

static int add_sample(struct rows *rows, const struct sample *sample, int64_t offset) {
    if (sample->images != 1 || !(sample->has_label || sample->has_json)) return 0;
    struct span text = sample->has_label ? sample->label : sample->json;
    const unsigned char *p = text.start, *end = p + text.bytes;
    while (p < end && is_blank(*p)) p++;
    while (p < end && is_blank(end[-1])) end--;
    int64_t *to = rows->columns + rows->count++;
    to[IMAGE_OFFSET * rows->capacity] = offset + sample->image_start;
    to[IMAGE_BYTES * rows->capacity] = sample->image_bytes;
    to[KEY_START * rows->capacity] = sample->key.start - rows->text;
    to[KEY_BYTES * rows->capacity] = sample->key.bytes;
    to[TEXT_START * rows->capacity] = p - rows->text;
    to[TEXT_BYTES * rows->capacity] = end - p;
    to[TEXT_NUMBER * rows->capacity] = sample->has_label ? whole_number(p, end) : -2;
    return 1;
}

/* Finds samples in the `length` bytes at `offset` of an archive of `size` bytes, where the headers of a
   sample begin. image: its suffix, or nothing; label: the label's. Only samples behind which another one
   begins are known to be whole. state: [0] where the first one that was not found begins, in the piece; [1]
   whether that is because the piece ends, or because there are `capacity`. */
int64_t plsc_tar_samples(const unsigned char *piece, int64_t length, int64_t offset, int64_t size,
                         const char *image, const char *label, int64_t capacity, int64_t *columns,
                         int64_t *state) {
    struct rows rows = {piece, columns, capacity, 0, 0};
    struct sample sample = {0};
    int64_t at = 0;
    int found;
    for (;;) {
        struct member member;
        found = read_member(piece, length, at, size - offset, &member);
        if (found <= 0) break;
        if (found == 1) {
            int is_next = sample.members && (member.key.bytes != sample.key.bytes ||
                                             memcmp(member.key.start, sample.key.start,
                                                    (size_t)sample.key.bytes) != 0);
            if (is_next) {
                if (rows.count == capacity) {
                    found = -1;
                    break;
                }
                if (!add_sample(&rows, &sample, offset)) {
                    found = 0;
                    break;
                }
            }
            if (is_next || !sample.members) {
                sample = (struct sample){.key = member.key, .start = at};
            }
            found = add_member(&sample, &member, piece, length, image, label);
            if (found <= 0) break;
        }
        at = member.behind;
    }
    state[0] = sample.members ? sample.start : at;
    state[1] = found < 0;
    return rows.count;
}
