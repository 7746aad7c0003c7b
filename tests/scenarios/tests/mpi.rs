//! The scenarios over MPI, started by the real mpirun.

fn main() {
    flow_harness::run_tests_of(env!("CARGO_BIN_EXE_mpi_worker").into());
}
