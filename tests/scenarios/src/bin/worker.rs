//! Runs one scenario of process groups: `worker FILE::NAME`; or tests them: `worker --test`.

fn main() -> anyhow::Result<std::process::ExitCode> {
    flow_scenarios::main()
}
