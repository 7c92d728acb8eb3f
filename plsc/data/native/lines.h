/* Shared by lines.c and search.c: the label of a line. */
#ifndef PLSC_DATA_LINES_H
#define PLSC_DATA_LINES_H

#include "native.h"

/* Reads the digits at the end of data[start, end) and the tab before them. Returns where the tab is, or -1
   if the line is not that simple: then the naive reader tells what it is. */
int64_t read_label(const uint8_t *data, int64_t start, int64_t end, int64_t *label);

#endif
