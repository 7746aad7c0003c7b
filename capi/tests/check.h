/* What the programs here check with. */
#pragma once

#include "flow_comm.h"

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "line %d: %s; last error: %s\n", __LINE__, #condition,                 \
                    flow_error_message());                                                         \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)
#define OK(call) CHECK((call) == FLOW_OK)
