/* Shared by the C files of the data tools. They do not use the Python API: they are called through ctypes,
   which releases the interpreter lock, and have no state. */
#ifndef PLSC_DATA_NATIVE_H
#define PLSC_DATA_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define PLSC_DATA_ABI 11 /* _ABI of __init__.py: increase both when a function changes */
#define PLSC_API __attribute__((visibility("default")))

#endif
