/* Three ranks under flow-launch --elastic in-place. Rank 1 is killed; the others go on, and take in the one that is started for it. Prints
 * "rank R is done", or what was not as it should be. */
#include "check.h"

#include <signal.h>
#include <stdbool.h>
#include <string.h>

static flow_group *group;

static int64_t reduce(int64_t value, flow_op op) {
    OK(flow_all_reduce(group, (flow_buffer){&value, 1, FLOW_I64}, op));
    return value;
}

static void reconfigure(void) {
    flow_group *made;
    OK(flow_reconfigure(group, &made));
    flow_leave(group);
    group = made;
}

static void go_on_without_rank_1(int64_t before) {
    CHECK(reduce(1, FLOW_SUM) == 3);
    if (before == 1) raise(SIGKILL);
    int64_t value = 1;
    const int code = flow_all_reduce(group, (flow_buffer){&value, 1, FLOW_I64}, FLOW_SUM);
    CHECK(code == FLOW_ERROR_PEER_LOST || code == FLOW_ERROR_POISONED);
    CHECK(strstr(flow_error_message(), "rank 1"));
    reconfigure();
}

int main(void) {
    const bool is_new = strcmp(getenv("FLOW_REPLACEMENT"), "0") != 0;
    const int64_t before = atoi(getenv("RANK"));
    OK(flow_join(NULL, NULL, 60, &group));
    if (!is_new) go_on_without_rank_1(before);
    while (flow_world_size(group) < 3) {
        CHECK(flow_world_size(group) == 2 && (int64_t)flow_rank(group) == before / 2);
        size_t waiting = 0;
        OK(flow_newcomers(group, &waiting));
        if (reduce((int64_t)waiting, FLOW_MAX) > 0) reconfigure();
    }
    CHECK((int64_t)flow_rank(group) == before);
    CHECK(is_new == (before == 1));
    CHECK(reduce(before + 1, FLOW_PRODUCT) == 6);

    /* What cannot be. */
    const size_t two[] = {0, 1};
    if (before < 2) {
        flow_group *part, *made;
        size_t waiting;
        OK(flow_new_group_of(group, two, 2, "two", &part));
        CHECK(flow_reconfigure(part, &made) == FLOW_ERROR_ARGUMENT && strstr(flow_error_message(), "sub-group"));
        CHECK(flow_newcomers(part, &waiting) == FLOW_ERROR_ARGUMENT);
        flow_leave(part);
    }
    CHECK(flow_reconfigure(NULL, NULL) == FLOW_ERROR_ARGUMENT);
    OK(flow_barrier(group));
    flow_leave(group);
    printf("rank %d is done\n", (int)before);
    return 0;
}
