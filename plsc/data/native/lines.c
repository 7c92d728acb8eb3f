/* Parse lines of <base64>TAB<label>: their ends and labels. The Python counterparts are find_newlines and
   read_lines of plsc/data/lines.py. */
#include "native.h"

#include <string.h>

#define MOST_DIGITS 18 /* MAX_LABEL_DIGITS of lines.py: such numbers fit int64 */

/* Write the positions of newlines in data[begin, end) to found, at most `room`, and return their number.
   *next: where to continue, `end` if everything was searched. */
PLSC_API int64_t plsc_find_newlines(const uint8_t *data, int64_t begin, int64_t end, int64_t *found,
                                    int64_t room, int64_t *next) {
    const uint8_t *at = data + begin, *stop = data + end;
    int64_t count = 0;
    while (at < stop && count < room) {
        const uint8_t *hit = memchr(at, '\n', (size_t)(stop - at));
        if (hit == NULL) {
            at = stop;
            break;
        }
        found[count++] = hit - data;
        at = hit + 1;
    }
    *next = at - data;
    return count;
}

/* Read the digits at the end of data[start, end) and the tab before them. Return the position of the tab, or
   -1 if the line has another form: then parse_line of lines.py parses it or reports the error. */
static int64_t read_label(const uint8_t *data, int64_t start, int64_t end, int64_t *label) {
    int64_t at = end, value = 0, scale = 1;
    while (at > start && end - at < MOST_DIGITS) {
        unsigned digit = (unsigned)data[at - 1] - '0';
        if (digit > 9)
            break;
        value += (int64_t)digit * scale;
        scale *= 10;
        at--;
    }
    *label = value;
    if (at == end || at - 1 <= start || data[at - 1] != '\t')
        return -1;
    return at - 1;
}

/* Parse the lines that begin at `begin` and end at the `count` newlines, without blank lines. The first line
   has number `first_number`. The last newline may be `size` if it is missing. Each output has room for
   `count` values. tabs is -1 for lines longer than `longest` and for those left to parse_line; *suspects is
   their number. Return the number of lines, or -1 if the newlines are not ascending positions in the data. */
PLSC_API int64_t plsc_read_lines(const uint8_t *data, int64_t size, int64_t begin,
                                 const int64_t *newlines, int64_t count, int64_t first_number,
                                 int64_t longest, int64_t *starts, int64_t *ends, int64_t *tabs,
                                 int64_t *labels, int64_t *numbers, int64_t *suspects) {
    int64_t start = begin, kept = 0;
    *suspects = 0;
    if (begin < 0)
        return -1;
    for (int64_t i = 0; i < count; i++) {
        int64_t end = newlines[i], next = end + 1;
        if (end < start || end > size)
            return -1;
        if (end > start && data[end - 1] == '\r')
            end--;
        if (end > start) {
            starts[kept] = start;
            ends[kept] = end;
            numbers[kept] = first_number + i;
            tabs[kept] = read_label(data, start, end, &labels[kept]);
            if (end - start > longest)
                tabs[kept] = -1;
            *suspects += tabs[kept] < 0;
            kept++;
        }
        start = next;
    }
    return kept;
}
