/* Two ranks call every function of flow_comm.h but those of elastic.c. Prints "rank R is done", or what was not as it should be. */
#define _GNU_SOURCE /* gettid */
#include "check.h"

#include <math.h>
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define FAILS(code, text, call)                                                                    \
    do {                                                                                           \
        CHECK((call) == (code));                                                                   \
        CHECK(strstr(flow_error_message(), text));                                                 \
    } while (0)
#define I64(array) ((flow_buffer){array, sizeof(array) / sizeof((array)[0]), FLOW_I64})

static flow_group *group;
static int64_t rank;

static void collectives(void) {
    int64_t own[2] = {rank, 10 + rank}, all[4] = {0}, blocks[4] = {rank, 2, 3 + rank, 4}, half[2];

    OK(flow_barrier(group));
    OK(flow_all_reduce(group, I64(own), FLOW_SUM));
    CHECK(own[0] == 1 && own[1] == 21);
    own[0] = rank;
    OK(flow_reduce(group, I64(own), FLOW_MAX, 1));
    CHECK(own[0] == rank && own[1] == 21); /* on rank 0 as it was */
    own[0] = 7 + rank;
    OK(flow_broadcast(group, I64(own), 1));
    CHECK(own[0] == 8);
    own[0] = rank;

    OK(flow_all_gather(group, I64(own), I64(all)));
    CHECK(all[0] == 0 && all[2] == 1 && all[3] == 21);
    memset(all, 0, sizeof all);
    all[2 * rank] = 5 + rank; /* the input is this rank's part of the output */
    OK(flow_all_gather(group, (flow_buffer){all + 2 * rank, 2, FLOW_I64}, I64(all)));
    CHECK(all[0] == 5 && all[2] == 6);
    memset(all, 0, sizeof all);
    OK(flow_gather(group, I64(own), rank == 1 ? I64(all) : (flow_buffer){0}, 1));
    CHECK(rank == 0 ? all[1] == 0 : all[1] == 21 && all[2] == 1);
    OK(flow_scatter(group, rank == 0 ? I64(blocks) : (flow_buffer){0}, I64(half), 0));
    CHECK(half[0] == (rank == 0 ? 0 : 3) && half[1] == (rank == 0 ? 2 : 4));
    OK(flow_reduce_scatter(group, I64(blocks), I64(half), FLOW_PRODUCT));
    CHECK(half[0] == (rank == 0 ? 0 : 12) && half[1] == (rank == 0 ? 4 : 16));
    OK(flow_all_to_all(group, I64(blocks), I64(all)));
    CHECK(all[0] == (rank == 0 ? 0 : 3) && all[2] == (rank == 0 ? 1 : 4));

    size_t counts[2] = {1, 3}, sent[2] = {1, 3}, received[2] = {rank == 0 ? 1 : 3, rank == 0 ? 1 : 3};
    int64_t to[6] = {0};
    OK(flow_all_gather_v(group, (flow_buffer){blocks, counts[rank], FLOW_I64}, I64(all), counts));
    CHECK(all[0] == 0 && all[1] == 1 && all[2] == 2 && all[3] == 4);
    OK(flow_reduce_scatter_v(group, I64(blocks), (flow_buffer){to, counts[rank], FLOW_I64}, counts, FLOW_MIN));
    CHECK(rank == 0 ? to[0] == 0 : to[0] == 2 && to[1] == 3 && to[2] == 4);
    flow_buffer output = {to, received[0] + received[1], FLOW_I64};
    OK(flow_all_to_all_v(group, I64(blocks), sent, output, received));
    CHECK(rank == 0 ? to[0] == 0 && to[1] == 1 : to[0] == 2 && to[3] == 2 && to[4] == 4);

    double mean = rank;
    OK(flow_all_reduce(group, (flow_buffer){&mean, 1, FLOW_F64}, FLOW_AVG));
    CHECK(fabs(mean - 0.5) < 1e-15);
    OK(flow_all_reduce(group, (flow_buffer){NULL, 0, FLOW_F32}, FLOW_SUM));
}

static void messages(void) {
    int64_t first[1] = {0}, second[1] = {0};
    size_t from = 9;
    if (rank == 0) {
        first[0] = 1, second[0] = 2;
        OK(flow_send(group, I64(first), 1, 4));
        OK(flow_send(group, I64(second), 1, 5));
        OK(flow_recv_any(group, I64(first), 6, &from));
        CHECK(from == 1 && first[0] == 3);
    } else {
        OK(flow_recv(group, I64(second), 0, 5));
        OK(flow_recv(group, I64(first), 0, 4));
        CHECK(first[0] == 1 && second[0] == 2);
        first[0] = 3;
        OK(flow_send(group, I64(first), 0, 6));
    }
}

static void shared_memory(void) {
    enum { COUNT = 100000 };
    flow_block *block;
    void *data;
    OK(flow_alloc(group, COUNT * sizeof(float), &block, &data));
    CHECK((uintptr_t)data % 64 == 0 && flow_is_shared(group, data, COUNT * sizeof(float)));
    CHECK(!flow_is_shared(group, &data, sizeof data) && !flow_is_shared(NULL, data, 1));
    float *values = data;
    for (int round = 0; round < 3; ++round) {
        for (int i = 0; i < COUNT; ++i) values[i] = (float)(i % 100) + (float)rank;
        /* Pieces may lie anywhere. */
        const flow_buffer pieces[3] = {{values + COUNT / 2, COUNT / 2, FLOW_F32}, {NULL, 0, FLOW_F32}, {values, COUNT / 2, FLOW_F32}};
        bool launched = false;
        OK(flow_launch_bucket(group, pieces, 3, 1, FLOW_SUM, &launched));
        CHECK(launched);
        OK(flow_progress(group));
        OK(flow_finish_buckets(group));
        CHECK(flow_bucket_age(group, 1) >= 0 && flow_bucket_age(group, 2) < 0 && flow_bucket_age(NULL, 1) < 0);
        flow_end_step();
        for (int i = 0; i < COUNT; ++i) CHECK(values[i] == (float)(2 * (i % 100) + 1));
    }
    int64_t own[1] = {0};
    bool launched;
    const flow_buffer mixed[2] = {{values, 1, FLOW_F32}, I64(own)};
    FAILS(FLOW_ERROR_ARGUMENT, "bucket 2: the memory is not shared",
          flow_launch_bucket(group, &mixed[1], 1, 2, FLOW_SUM, &launched));
    FAILS(FLOW_ERROR_ARGUMENT, "bucket 2: its pieces must have one type",
          flow_launch_bucket(group, mixed, 2, 2, FLOW_SUM, &launched));
    FAILS(FLOW_ERROR_ARGUMENT, "bucket 2: it has no pieces", flow_launch_bucket(group, NULL, 0, 2, FLOW_SUM, &launched));

    /* A forked process is no rank, and what it frees stays its parent's. */
    pid_t child = fork();
    if (child == 0) {
        bool forked = flow_barrier(group) == FLOW_ERROR_FORKED && strstr(flow_error_message(), "was forked from rank") &&
                      flow_alloc(group, 8, &block, &data) == FLOW_ERROR_FORKED && values[1] == 3;
        flow_free(block);
        flow_leave(group);
        _exit(forked ? 0 : 1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0 && values[1] == 3);
    flow_free(block);
    flow_free(NULL);
}

static void arguments(void) {
    int64_t own[1] = {0};
    flow_block *block;
    void *data;
    FAILS(FLOW_ERROR_ARGUMENT, "group is null", flow_barrier(NULL));
    FAILS(FLOW_ERROR_ARGUMENT, "8 bytes is null", flow_broadcast(group, (flow_buffer){NULL, 1, FLOW_I64}, 0));
    FAILS(FLOW_ERROR_ARGUMENT, "7 is not the code of a dtype", flow_broadcast(group, (flow_buffer){own, 1, 7}, 0));
    FAILS(FLOW_ERROR_ARGUMENT, "300 is not the code of a reduce operation", flow_all_reduce(group, I64(own), 300));
    FAILS(FLOW_ERROR_ARGUMENT, "more than any memory", flow_broadcast(group, (flow_buffer){own, SIZE_MAX, FLOW_I64}, 0));
    FAILS(FLOW_ERROR_ARGUMENT, "root 2", flow_broadcast(group, I64(own), 2));
    FAILS(FLOW_ERROR_ARGUMENT, "counts", flow_all_gather_v(group, I64(own), I64(own), NULL));
    FAILS(FLOW_ERROR_ARGUMENT, "a timeout of -1 s", flow_set_timeout(group, -1));
    FAILS(FLOW_ERROR_ARGUMENT, "a timeout of NaN s", flow_set_timeout(group, NAN));
    FAILS(FLOW_ERROR_ARGUMENT, "from is null", flow_recv_any(group, I64(own), 0, NULL));
    FAILS(FLOW_ERROR_ARGUMENT, "cause is null", flow_abort(group, NULL));
    FAILS(FLOW_ERROR_SYSTEM, "no room", flow_alloc(group, SIZE_MAX / 4, &block, &data));
    flow_membership member = {2, 2, 0, 1, -1, NULL, NULL};
    flow_group *none = NULL;
    FAILS(FLOW_ERROR_ARGUMENT, "rank 2: flow_join", flow_join(&member, NULL, 0, &none));
    member.rank = 1;
    FAILS(FLOW_ERROR_ARGUMENT, "need an address", flow_join(&member, NULL, 0, &none));
    member.address = "port 5", member.token = "";
    FAILS(FLOW_ERROR_ARGUMENT, "no store address", flow_join(&member, NULL, 0, &none));
    CHECK(flow_rank(NULL) == 0 && flow_world_size(NULL) == 0);
    flow_leave(NULL);
}

/* What is moved as bytes is compared by what the program calls it. */
static void labels(void) {
    const size_t ranks[2] = {0, 1};
    int64_t all[2], own[1] = {rank};
    flow_group *same, *apart, *as_called, *messages;
    OK(flow_new_group_of(group, ranks, 2, "same", &same));
    OK(flow_with_label(same, "all_reduce", "int64, band", &as_called));
    OK(flow_all_gather(as_called, I64(own), I64(all)));
    CHECK(all[0] == 0 && all[1] == 1);
    flow_leave(as_called);
    OK(flow_all_gather(same, I64(own), I64(all)));

    OK(flow_with_label(same, "all_reduce", rank == 0 ? "float8_e4m3, max" : "float8_e4m3, min", &as_called));
    char said[128];
    const char *names[2] = {"max", "min"};
    snprintf(said, sizeof said, "rank %d called all_reduce #2 (8 bytes of float8_e4m3, %s), rank %d called all_reduce #2 (8 bytes of float8_e4m3, %s)",
             (int)rank, names[rank], 1 - (int)rank, names[1 - rank]);
    FAILS(FLOW_ERROR_MISMATCH, said, flow_all_gather(as_called, I64(own), I64(all)));
    flow_leave(as_called);
    flow_leave(same);

    OK(flow_new_group_of(group, ranks, 2, "renamed", &same));
    OK(flow_with_label(same, "all_reduce", "", &as_called));
    FAILS(FLOW_ERROR_MISMATCH, rank == 0 ? "rank 0 called all_reduce #0 (1 x i64), rank 1 called all_gather #0 (1 x i64)"
                                         : "rank 1 called all_gather #0 (1 x i64), rank 0 called all_reduce #0 (1 x i64)",
          flow_all_gather(rank == 0 ? as_called : same, I64(own), I64(all)));
    flow_leave(as_called);
    flow_leave(same);

    OK(flow_new_group_of(group, ranks, 2, "apart", &apart));
    OK(flow_with_label(apart, rank == 0 ? "send" : "recv", rank == 0 ? "int16" : "int8", &messages));
    if (rank == 0) {
        OK(flow_send(messages, I64(own), 1, 0));
    } else {
        FAILS(FLOW_ERROR_MISMATCH, "rank 0 sends 8 bytes of int16, rank 1 receives 8 bytes of int8", flow_recv(messages, I64(own), 0, 0));
    }
    flow_leave(messages);
    flow_leave(apart);
    FAILS(FLOW_ERROR_ARGUMENT, "no label", flow_with_label(group, "all_dance", "int8", &messages));
    FAILS(FLOW_ERROR_ARGUMENT, "no label", flow_with_label(group, "all_reduce", "more than 16 bytes", &messages));
}

static volatile bool is_interrupted;

static bool interrupted(void) { return is_interrupted; }

/* What stands for Python: its main thread is this one. */
static bool has_signal;
static void *raised;

static int ensure(void) { return 7; }
static void release(int state) { CHECK(state == 7); }
static int check_signals(void) { return has_signal ? -1 : 0; }
static void fetch(void **type, void **value, void **place) {
    has_signal = false;
    *type = *value = *place = &has_signal;
}
static void restore(void *type, void *value, void *place) {
    CHECK(type == value && value == place);
    raised = value;
}

static void signals_of_python(void) {
    const size_t ranks[2] = {0, 1};
    flow_group *apart;
    OK(flow_new_group_of(group, ranks, 2, "python", &apart));
    if (rank == 1) {
        const flow_python python = {ensure, release, check_signals, fetch, restore};
        flow_watch_python(NULL);
        flow_watch_python(&python);
        flow_raise_interrupt();
        CHECK(raised == NULL);
        has_signal = true;
        FAILS(FLOW_ERROR_INTERRUPTED, "rank 1 was interrupted", flow_barrier(apart));
        flow_raise_interrupt();
        CHECK(raised == &has_signal);
        raised = NULL;
        flow_raise_interrupt();
        CHECK(raised == NULL); /* it was raised */
    }
    OK(flow_barrier(group));
    FAILS(FLOW_ERROR_POISONED, "rank 1 was interrupted", flow_barrier(apart));
    flow_leave(apart);
}

static void interrupts(void) {
    const size_t ranks[2] = {0, 1};
    flow_group *apart;
    OK(flow_new_group_of(group, ranks, 2, "interrupted", &apart));
    if (rank == 0) {
        flow_set_interrupt_check(interrupted);
        is_interrupted = true;
        FAILS(FLOW_ERROR_INTERRUPTED, "rank 0: barrier #0 failed: rank 0 was interrupted", flow_barrier(apart));
        is_interrupted = false;
    }
    OK(flow_barrier(group)); /* other groups go on */
    FAILS(FLOW_ERROR_POISONED, "rank 0 was interrupted", flow_barrier(apart));
    flow_leave(apart);

    /* A thread that is told, which waits for the making of a group: the others are told as well. */
    if (rank == 0) {
        flow_interrupt(gettid(), true);
        FAILS(FLOW_ERROR_INTERRUPTED, "rank 0 was interrupted", flow_new_group_of(group, ranks, 2, "never", &apart));
        flow_interrupt(gettid(), false);
    }
    OK(flow_barrier(group));
    if (rank == 1) FAILS(FLOW_ERROR_SYSTEM, "rank 0 was interrupted", flow_new_group_of(group, ranks, 2, "never", &apart));

    /* Joins: one that waits for another rank, and one that waits for rank 0's store. */
    char address[128];
    snprintf(address, sizeof address, "unix://flow-capi-never-%d-%s", (int)rank, getenv("FLOW_TEST_JOB"));
    is_interrupted = rank == 0;
    flow_interrupt(gettid(), rank == 1);
    for (size_t as = 0; as < 2; ++as) {
        flow_membership member = {as, 2, as, 2, -1, address, "secret"};
        FAILS(FLOW_ERROR_INTERRUPTED, "joining the process group failed", flow_join(&member, "never", 600, &apart));
    }
    flow_interrupt(gettid(), false);
    is_interrupted = false;
}

static void *tells(void *unused) {
    for (;;) {
        flow_interrupt(1, true);
        pthread_testcancel();
    }
    return unused;
}

/* Another thread may be just about to tell one when a process forks: the child tells threads of its own all the same. */
static void interrupts_of_a_child(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, tells, NULL) == 0);
    for (int i = 0; i < 1000; ++i) {
        pid_t child = fork();
        if (child == 0) {
            alarm(60);
            flow_interrupt(gettid(), true);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, NULL) == 0);
    flow_interrupt(1, false);
}

static void groups(void) {
    flow_group *alone, *swapped, *again;
    size_t ranks[2] = {1, 0}, own[1] = {rank};
    OK(flow_new_group_of(group, own, 1, rank == 0 ? "zero" : "one", &alone));
    CHECK(flow_rank(alone) == 0 && flow_world_size(alone) == 1);
    OK(flow_new_group_of(group, ranks, 2, "swapped", &swapped));
    CHECK(flow_rank(swapped) == 1 - (size_t)rank && flow_local_world_size(swapped) == 2);
    CHECK(flow_local_rank(swapped) == (size_t)rank);
    OK(flow_barrier(swapped));

    /* Joined by hand, under a name that the ranks agree on. */
    char token[64];
    snprintf(token, sizeof token, "%d-%s", rank == 0 ? (int)getpid() : 0, getenv("FLOW_TEST_JOB"));
    OK(flow_broadcast(group, (flow_buffer){token, sizeof token, FLOW_U8}, 0));
    char address[128];
    snprintf(address, sizeof address, "unix://flow-capi-%s", token);
    flow_membership member = {rank, 2, rank, 2, -1, address, token};
    OK(flow_join(&member, "again", 60, &again));
    int64_t one[1] = {1};
    OK(flow_all_reduce(again, I64(one), FLOW_SUM));
    CHECK(one[0] == 2);

    /* Each operation may have its own timeout; a group that fails leaves others alone. */
    if (rank == 0) {
        flow_group *impatient;
        OK(flow_with_timeout(again, 0.2, &impatient));
        FAILS(FLOW_ERROR_TIMEOUT, "barrier #1 timed out after 200ms: waited for rank 1", flow_barrier(impatient));
        flow_leave(impatient);
        FAILS(FLOW_ERROR_POISONED, "an earlier failure", flow_barrier(again));
    }
    OK(flow_barrier(group));
    OK(flow_set_timeout(swapped, 60));
    if (rank == 1) OK(flow_abort(swapped, "enough"));
    FAILS(FLOW_ERROR_POISONED, "enough", flow_barrier(swapped));
    OK(flow_barrier(group));
    flow_leave(again);
    flow_leave(swapped);
    flow_leave(alone);
}

int main(int count, char **words) {
    CHECK(flow_error_message()[0] == '\0');
    OK(flow_join(NULL, NULL, 60, &group));
    rank = (int64_t)flow_rank(group);
    CHECK(flow_world_size(group) == 2);
    if (count > 1 && strcmp(words[1], "killed") == 0) {
        if (rank == 1) raise(SIGKILL);
        FAILS(FLOW_ERROR_PEER_LOST, "barrier #0 failed: rank 1 (pid", flow_barrier(group));
    } else {
        collectives();
        messages();
        shared_memory();
        arguments();
        labels();
        interrupts();
    signals_of_python();
        interrupts_of_a_child();
        groups();
    }
    flow_leave(group);
    printf("rank %d is done\n", (int)rank);
    return 0;
}
