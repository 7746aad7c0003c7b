/* OpenMPI's side of `flow-bench allreduce`: f32 sums, one JSON line per size from rank 0.
 *
 * usage: mpicc -O2 allreduce.c -o allreduce && mpirun -np R ./allreduce BYTES... */

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static const double SECONDS_PER_SIZE = 0.3;

static int compare(const void *left, const void *right) {
    double difference = *(const double *)left - *(const double *)right;
    return (difference > 0) - (difference < 0);
}

static double sum_of_times(float *data, int count, int repetitions, double *times) {
    double total = 0;
    for (int i = 0; i < repetitions; i++) {
        double start = MPI_Wtime();
        MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        times[i] = MPI_Wtime() - start;
        total += times[i];
    }
    return total;
}

int main(int argc, char **argv) {
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int i = 1; i < argc; i++) {
        int bytes = atoi(argv[i]), count = bytes / (int)sizeof(float);
        float *data = calloc(count, sizeof(float));
        double warm_up[5];
        sum_of_times(data, count, 5, warm_up);
        qsort(warm_up, 5, sizeof(double), compare);
        double wanted = SECONDS_PER_SIZE / (warm_up[2] > 1e-7 ? warm_up[2] : 1e-7);
        int repetitions = wanted < 5 ? 5 : (int)wanted;
        MPI_Bcast(&repetitions, 1, MPI_INT, 0, MPI_COMM_WORLD);
        double *times = malloc(repetitions * sizeof(double));
        double total = sum_of_times(data, count, repetitions, times);
        qsort(times, repetitions, sizeof(double), compare);
        if (rank == 0) {
            printf("{\"bench\": \"allreduce\", \"memory\": \"ordinary\", \"bytes\": %d, \"ranks\": %d, "
                   "\"median_us\": %.3f, \"mean_us\": %.3f}\n",
                   bytes, ranks, times[repetitions / 2] * 1e6, total / repetitions * 1e6);
            fflush(stdout);
        }
        free(times);
        free(data);
    }
    MPI_Finalize();
    return 0;
}
