//! Runs one scenario of process groups, compiled with MPI: `mpi_worker FILE::NAME`; or tests them:
//! `mpi_worker --test`.

fn main() -> anyhow::Result<std::process::ExitCode> {
    flow_scenarios::main()
}
