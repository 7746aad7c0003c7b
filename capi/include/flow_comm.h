/* flow-comm's process groups and collectives, for any language: link libflow_comm.so.
 *
 *     flow_group *group;
 *     if (flow_join(NULL, NULL, 0, &group) != FLOW_OK) {
 *         fprintf(stderr, "%s\n", flow_error_message());
 *         exit(1);
 *     }
 *     float sum = 1;
 *     flow_all_reduce(group, (flow_buffer){&sum, 1, FLOW_F32}, FLOW_SUM);
 *     flow_leave(group);
 *
 * Errors. Functions that return an int return FLOW_OK or one of the codes below; flow_error_message() has the text of the
 * last error of the calling thread, which names the rank, the operation and, where there is one, the peer. After an error,
 * what a function was to write is as it was. Null pointers, numbers out of range and timeouts that are none are
 * FLOW_ERROR_ARGUMENT, and harm nobody. A collective that fails makes its group unusable on all ranks; groups that were made
 * from it, and the one that it was made from, fail apart.
 *
 * Time. All functions block: at most as long as the group's timeout says for each wait. A rank that dies is an error on the
 * others, usually within a fraction of a second.
 *
 * Order. All ranks of a group call the same collectives in the same order with the same counts and types; the group checks
 * that they do.
 *
 * Threads. A group may be used by several threads. Its collectives are to be called in one order on all ranks, so one thread
 * at a time calls them. Messages to one rank go one after the other. Messages to different ranks, from different ranks and
 * with different tags do not wait for each other or for collectives, if they are called by threads of their own.
 *
 * Fork. A process that is forked from a rank, and is not replaced by another program, is not a member of the rank's groups:
 * all operations on them are FLOW_ERROR_FORKED there, and flow_leave and flow_free do nothing. It may read the shared memory
 * that it has inherited, which is not copied on write, and may join as a rank of its own.
 */
#ifndef FLOW_COMM_H
#define FLOW_COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Results of functions. */
enum {
    FLOW_OK = 0,
    FLOW_ERROR_ENVIRONMENT = 1, /* the environment does not describe a rank */
    FLOW_ERROR_JOIN = 2,        /* ranks could not find each other */
    FLOW_ERROR_ARGUMENT = 3,    /* an argument that cannot work, found before anything was sent */
    FLOW_ERROR_MISMATCH = 4,    /* ranks called different operations, now or before */
    FLOW_ERROR_TIMEOUT = 5,     /* some ranks did not arrive in time */
    FLOW_ERROR_PEER_LOST = 6,   /* a rank died, or left the group, while others needed it */
    FLOW_ERROR_POISONED = 7,    /* the group has failed before */
    FLOW_ERROR_FORKED = 8,      /* this process was forked from a rank, and is none itself */
    FLOW_ERROR_SYSTEM = 9,      /* the system refused something, or shared memory is full */
    FLOW_ERROR_PANIC = 10,      /* an error in flow-comm itself */
    FLOW_ERROR_INTERRUPTED = 11 /* flow_set_interrupt_check's function has ended a wait */
};

/* Types of elements. */
typedef enum {
    FLOW_F32 = 0,
    FLOW_F64 = 1,
    FLOW_F16 = 2,
    FLOW_BF16 = 3,
    FLOW_I32 = 4,
    FLOW_I64 = 5,
    FLOW_U8 = 6
} flow_dtype;

/* The way in which the ranks' elements become one. Operands are taken in rank order: results are the same bits on all ranks. */
typedef enum {
    FLOW_SUM = 0,
    FLOW_AVG = 1, /* the sum divided by the number of ranks */
    FLOW_PRODUCT = 2,
    FLOW_MIN = 3,
    FLOW_MAX = 4
} flow_op;

/* A process group, and this process's place in it. */
typedef struct flow_group flow_group;

/* Memory that all ranks of the machine can reach. */
typedef struct flow_block flow_block;

/* Elements that belong to the caller: aligned for their type. `data` may be null if there are none. */
typedef struct {
    void *data;
    size_t count;
    flow_dtype dtype;
} flow_buffer;

/* This process's rank in a job, and the way in which the ranks find each other. */
typedef struct {
    size_t rank, world_size;
    size_t local_rank, local_world_size; /* the same among the ranks of this machine */
    int64_t node;                        /* the number of the machine; -1 to tell machines apart by their names */
    /* The address at which rank 0 serves the store by which the ranks find each other, the same on all ranks: unix://NAME for a job on
     * one machine, of a name that no other job uses; tcp://HOST:PORT with a free port of rank 0's machine. Null for a job of
     * one rank. */
    const char *address;
    /* The secret that admits to that store: the same on all ranks, and known to nobody else. */
    const char *token;
} flow_membership;

/* Returns the text of the last error of this thread; "" if there was none. It stays until the thread's next error. */
const char *flow_error_message(void);

/* Sets a function that each thread calls some times a second while it waits: an interpreter's look at signals, say. If it
 * returns true the operation fails with FLOW_ERROR_INTERRUPTED, and its group on all ranks. flow_join and flow_new_group_of
 * make no group then. The first call in a process counts. */
void flow_set_interrupt_check(bool (*is_interrupted)(void));

/* Sets whether waits of this thread end in the same way; its number is Linux's (gettid). It is for a caller that has another
 * thread wait in its place. */
void flow_interrupt(int32_t thread, bool wanted);

/* Functions of CPython's that have these names. */
typedef struct {
    int (*PyGILState_Ensure)(void);
    void (*PyGILState_Release)(int);
    int (*PyErr_CheckSignals)(void);
    void (*PyErr_Fetch)(void **, void **, void **);
    void (*PyErr_Restore)(void *, void *, void *);
} flow_python;

/* In place of flow_set_interrupt_check, for Python that calls this library by ctypes: the main thread looks at Python's signals
 * while it waits. What a signal's handler raises ends the wait, and is kept. Null is without effect. */
void flow_watch_python(const flow_python *python);

/* Raises in Python what was kept, if there is such. The caller holds the GIL: it is a function of a ctypes.PyDLL. */
void flow_raise_interrupt(void);

/* ---- groups ---- */

/* Joins the ranks of the job, and waits for them. `membership` is null where the environment says which rank this is:
 * flow-launch's or torchrun's variables (RANK, WORLD_SIZE, ...), OpenMPI's or Slurm's; without any it is a group of this process
 * alone. Ranks that join under the same `name`, null being the empty one, meet: whatever else they have joined, under one name
 * all of them join equally often. `timeout` in seconds, 0 for 1800, is that of the wait and of the group.
 *
 * A process that flow-launch --elastic in-place has started for one that has ended joins the running ranks, by null and the empty
 * name: it waits until they call flow_reconfigure. */
int flow_join(const flow_membership *membership, const char *name, double timeout, flow_group **group);

/* Leaves the group, and frees it. Other ranks that still need this one get an error. Null is allowed. */
void flow_leave(flow_group *group);

/* This process's number in the group, the number of processes in it, and the same among the processes of this machine: the
 * local rank counts all ranks of the job on it, the local world size the group's. 0 for null. */
size_t flow_rank(const flow_group *group);
size_t flow_world_size(const flow_group *group);
size_t flow_local_rank(const flow_group *group);
size_t flow_local_world_size(const flow_group *group);

/* A group of some of the ranks, given by their numbers in this group, which only they call, all with the same list. They are
 * numbered in its order. `key` is a text that no other group which is being made has. */
int flow_new_group_of(const flow_group *group, const size_t *ranks, size_t count, const char *key, flow_group **made);

/* A new group of those ranks of the job that are left, in their order, and of processes that were started since: each has the place
 * of the one that has ended. All ranks that live call it, whether the group has failed or not, and wait for each other. What is
 * under way in the group of all ranks, and in groups made from it, fails, and nothing of it arrives later. No thread is in
 * flow_send or flow_recv of these groups meanwhile. Shared memory stays. The handles of before are freed by flow_leave as ever. For
 * the group of all ranks that flow_join with null, or this, has made, under flow-launch. */
int flow_reconfigure(const flow_group *group, flow_group **made);

/* How many processes wait for flow_reconfigure to take them in. Ranks may see different numbers at a time. */
int flow_newcomers(const flow_group *group, size_t *count);

/* A second handle of the same group, on which operations wait so long: their own timeout. It is freed by flow_leave, too; the
 * group is left with its last handle. */
int flow_with_timeout(const flow_group *group, double seconds, flow_group **made);

/* A second handle of the same group, for operations on elements of a type that is none of flow_dtype, or with a reduction that is
 * none of flow_op, which the caller does by moving bytes or parts of them. All ranks must give the same: else operations fail on all
 * of them. Errors call it `operation`, a name that flow_comm's errors have, such as "all_reduce" or "send", and name the `elements`:
 * at most 16 bytes of text, such as "int16, max", and none where only the operation has another name. It is freed by flow_leave, too. */
int flow_with_label(const flow_group *group, const char *operation, const char *elements, flow_group **made);

/* Sets how long this rank waits for others from now on. Handles of flow_with_timeout keep their own timeout: given one of
 * them, this changes the group's, and not the handle's. */
int flow_set_timeout(const flow_group *group, double seconds);

/* Makes the group unusable on all ranks, whose waits end with this cause. */
int flow_abort(const flow_group *group, const char *cause);

/* ---- collectives ---- */

/* Returns when all ranks have called it. */
int flow_barrier(const flow_group *group);

/* All ranks get the reduction in `data`. */
int flow_all_reduce(const flow_group *group, flow_buffer data, flow_op op);

/* Rank `root` gets the reduction; the others' data stays as it is. */
int flow_reduce(const flow_group *group, flow_buffer data, flow_op op, size_t root);

/* All ranks get rank `root`'s data. */
int flow_broadcast(const flow_group *group, flow_buffer data, size_t root);

/* All ranks get all inputs, in rank order; output is world size times as long. The input may be this rank's part of the
 * output. */
int flow_all_gather(const flow_group *group, flow_buffer input, flow_buffer output);

/* Gathers as flow_all_gather does, to rank `root` only; the others' output is not looked at. */
int flow_gather(const flow_group *group, flow_buffer input, flow_buffer output, size_t root);

/* Rank r gets block r of rank `root`'s input, which is world size times as long; the others' input is not looked at. */
int flow_scatter(const flow_group *group, flow_buffer input, flow_buffer output, size_t root);

/* Rank r gets the reduction of all blocks r of the inputs, which are world size times as long as the output. */
int flow_reduce_scatter(const flow_group *group, flow_buffer input, flow_buffer output, flow_op op);

/* Block s of rank r's output becomes block r of rank s's input; both are world size equal blocks. */
int flow_all_to_all(const flow_group *group, flow_buffer input, flow_buffer output);

/* The same with blocks of different lengths, a count of elements for each rank. For flow_all_gather_v and flow_reduce_scatter_v
 * they are the same on all ranks; for flow_all_to_all_v input_counts[s] go to rank s, and output_counts[r] come from rank r. */
int flow_all_gather_v(const flow_group *group, flow_buffer input, flow_buffer output, const size_t *counts);
int flow_reduce_scatter_v(const flow_group *group, flow_buffer input, flow_buffer output, const size_t *counts, flow_op op);
int flow_all_to_all_v(const flow_group *group, flow_buffer input, const size_t *input_counts, flow_buffer output,
                      const size_t *output_counts);

/* ---- messages ---- */

/* Sends to rank `to`, which receives as many elements of the same type with the same tag. May return before it does. */
int flow_send(const flow_group *group, flow_buffer data, size_t to, uint32_t tag);

/* The next message of rank `from` with this tag. Messages with other tags that come before are kept. */
int flow_recv(const flow_group *group, flow_buffer data, size_t from, uint32_t tag);

/* The next message with this tag of whichever rank has one first: that rank. */
int flow_recv_any(const flow_group *group, flow_buffer data, uint32_t tag, size_t *from);

/* ---- shared memory ---- */

/* At least so many bytes, of unspecified contents, that collectives use in place: they copy nothing from it or to it. `data` is
 * aligned to 64 bytes. Other ranks of the machine write to it during collectives that this rank takes part in, and at no other
 * time. The memory stays until flow_free, also after flow_leave. FLOW_ERROR_SYSTEM if there is no more. */
int flow_alloc(const flow_group *group, size_t bytes, flow_block **block, void **data);

/* Gives a block back. Null is allowed. */
void flow_free(flow_block *block);

/* Whether all of this memory is such that collectives of the group use it in place. */
bool flow_is_shared(const flow_group *group, const void *data, size_t bytes);

/* ---- buckets: all-reduces of shared memory that do not wait ---- */

/* Announces that a bucket is to be reduced on all ranks, and does not wait for them. Its `count` pieces, each somewhere in shared
 * memory, have one type, and the same lengths on all ranks. All ranks launch the same buckets in the same order; `number` names
 * the bucket in messages. `launched` is false if too many are under way: flow_progress, or flow_finish_buckets, makes room. The
 * memory is neither used nor freed until flow_finish_buckets, or any other collective of the group, has returned. One thread at a
 * time calls this and the next two: each waits for another that is under way. */
int flow_launch_bucket(const flow_group *group, const flow_buffer *pieces, size_t count, uint32_t number, flow_op op,
                       bool *launched);

/* Does this rank's share of the buckets that all ranks have launched, without waiting. */
int flow_progress(const flow_group *group);

/* Waits for all launched buckets. */
int flow_finish_buckets(const flow_group *group);

/* How many seconds ago this rank saw that the bucket which it launched last by this number was reduced. Below 0 if it is not, or there
 * is none. */
double flow_bucket_age(const flow_group *group, uint32_t number);

/* Notes that a step is over, a backward that has reduced gradients: `flow-launch top` shows them. */
void flow_end_step(void);

#ifdef __cplusplus
}
#endif

#endif
