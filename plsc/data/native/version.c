/* The ABI version of this library. */
#include "native.h"

PLSC_API int plsc_data_abi(void);

int plsc_data_abi(void) { return PLSC_DATA_ABI; }
