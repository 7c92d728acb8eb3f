/* Counts scores on a grid: the histograms of plsc/evaluate/all_pairs.py, which has the Python counterpart. */
#include <string.h>

#include "native.h"

#define GRID 1048576.0f  /* 2^20 steps per unit */
#define ROUND 9437184.0f /* 2^23 + 2^20: floats from 2^23 to 2^24 are integers, so that adding it rounds */
#define PART 1024        /* scores, which stay in the first-level cache */

/* Add 1 to counts[round(score * 2^20) + 2^20] for each score; scores are clipped to -1..1. */
static void count(const float *scores, int64_t size, uint32_t *counts) {
    uint32_t bin[PART];
    for (; size > 0; size -= PART, scores += PART) {
        int64_t part = size < PART ? size : PART;
        for (int64_t i = 0; i < part; i++) {
            float steps = scores[i] * GRID;
            steps = steps < -GRID ? -GRID : steps;
            steps = (steps > GRID ? GRID : steps) + ROUND;
            memcpy(&bin[i], &steps, sizeof steps);
        }
        for (int64_t i = 0; i < part; i++)
            counts[bin[i] & 0x7fffff]++; /* the mantissa: steps - 2^23 */
    }
}

/* Count the scores [rows, columns] of a tile: of row r, columns first[r] to split[r] - 1 in `same`, the
   following ones in `different`. Both have 2^21 + 1 counts, which must not overflow. Returns rows. */
PLSC_API int64_t plsc_count_scores(const float *scores, int64_t rows, int64_t columns, const int64_t *first,
                                   const int64_t *split, uint32_t *same, uint32_t *different) {
    for (int64_t row = 0; row < rows; row++, scores += columns) {
        count(scores + first[row], split[row] - first[row], same);
        count(scores + split[row], columns - split[row], different);
    }
    return rows;
}
