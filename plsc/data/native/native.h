/* Shared by the C parts of the data tools. None of them knows Python: they are called through ctypes,
   which releases the interpreter lock, and keep no state of their own. */
#ifndef PLSC_DATA_NATIVE_H
#define PLSC_DATA_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define PLSC_DATA_ABI 5 /* _ABI of __init__.py: raised when a function changes */
#define PLSC_API __attribute__((visibility("default")))

#endif
