/* The header as a C compiler reads it. */
#include "spillway.h"

int spillway_interface_of_header(void);
int spillway_interface_of_header(void) { return SPILLWAY_INTERFACE + SPILLWAY_RECEIVED; }
