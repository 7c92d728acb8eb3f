/* Records of a RecordIO file, as long as they are whole in one part (see recordio.py for the format). */
#include "native.h"

#include <string.h>

#define MAGIC 0xCED7230Au
#define HEAD 8   /* of a part: magic, flag and length */
#define HEADER 24 /* of an image: flag, label, two ids */

enum { OFFSET, BYTES, FLAG, IMAGE_BYTES };

PLSC_API int64_t plsc_records(const unsigned char *piece, int64_t length, int64_t offset,
                              int64_t size, int64_t capacity, int64_t *columns, float *labels,
                              int64_t *state);

/* Little-endian, whatever the machine is. */
static uint32_t word_at(const unsigned char *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static float float_at(const unsigned char *p) {
    uint32_t bits = word_at(p);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Finds records in the `length` bytes at `offset` of a file of `size` bytes, where one begins. A record is
   found if its head is in the piece. state: [0] where the first one that was not found begins, in the piece,
   or behind it; [1] whether that is because the piece ends, or because there are `capacity`. */
int64_t plsc_records(const unsigned char *piece, int64_t length, int64_t offset, int64_t size,
                     int64_t capacity, int64_t *columns, float *labels, int64_t *state) {
    int64_t count = 0, at = 0;
    state[1] = 1;
    while (count < capacity && at <= length - HEAD - HEADER - 4) {
        const unsigned char *head = piece + at;
        int64_t content = word_at(head + 4), flag = word_at(head + HEAD);
        int64_t end = at + HEAD + (content + 3) / 4 * 4;
        int64_t image = content - HEADER - 4 * flag;
        if (word_at(head) != MAGIC || content >> 29 || end > size - offset || image < 0) {
            state[1] = 0;
            break;
        }
        columns[OFFSET * capacity + count] = offset + at;
        columns[BYTES * capacity + count] = end - at;
        columns[FLAG * capacity + count] = flag;
        columns[IMAGE_BYTES * capacity + count] = image;
        labels[count++] = float_at(head + HEAD + (flag ? HEADER : 4));
        at = end;
    }
    state[0] = at;
    return count;
}
