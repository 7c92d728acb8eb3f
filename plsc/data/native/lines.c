/* Parse lines of <base64>TAB<label>: their ends, alphabet and labels. The Python counterparts are
   find_newlines, is_base64 and read_lines of plsc/data/lines.py. */
#include "native.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MOST_DIGITS 18 /* MAX_LABEL_DIGITS of files.py: such numbers fit int64 */

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

/* A byte c is neither of base64 nor a tab or line end if LOW[c & 15] & HIGH[c >> 4]: HIGH has a bit per group
   of upper halves that allow the same lower halves, and LOW the bits of the groups that do not allow it. */
static const uint8_t LOW[16] = {43, 35, 35, 35, 35, 35, 35, 35, 35, 34, 38, 53, 55, 50, 55, 53};
static const uint8_t HIGH[16] = {1, 32, 2, 4, 8, 16, 8, 16, 32, 32, 32, 32, 32, 32, 32, 32};

#if defined(__x86_64__)
/* Return whether `size` bytes, a multiple of 32, have none of these bytes. */
__attribute__((target("avx2"))) static int are_base64(const uint8_t *data, int64_t size) {
    __m256i low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)LOW));
    __m256i high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)HIGH));
    __m256i half = _mm256_set1_epi8(15), others = _mm256_setzero_si256();
    for (int64_t i = 0; i < size; i += 32) {
        __m256i bytes = _mm256_loadu_si256((const __m256i *)(data + i));
        __m256i lower = _mm256_shuffle_epi8(low, _mm256_and_si256(bytes, half));
        __m256i upper = _mm256_shuffle_epi8(high, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), half));
        others = _mm256_or_si256(others, _mm256_and_si256(lower, upper));
    }
    return _mm256_testz_si256(others, others);
}
#endif

/* Return 1 if all bytes are characters of base64, tabs or line ends, otherwise 0. */
PLSC_API int64_t plsc_is_base64(const uint8_t *data, int64_t size) {
    int64_t done = 0;
    int found = 1;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        done = size & ~(int64_t)31;
        found = are_base64(data, done);
    }
#endif
    while (found && done < size) {
        uint8_t byte = data[done++];
        found = !(LOW[byte & 15] & HIGH[byte >> 4]);
    }
    return found;
}

/* Read the digits at the end of data[start, end) and the tab before them. Return the position of the tab, or
   -1 if the line has another form, or a tab or carriage return before it: then parse_line of lines.py parses
   it or reports the error. */
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
    size_t size = (size_t)(at - 1 - start);
    return memchr(data + start, '\t', size) || memchr(data + start, '\r', size) ? -1 : at - 1;
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
