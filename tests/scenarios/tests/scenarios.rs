//! Every scenario of `worker`, in each of its jobs, as a test of its own.

fn main() {
    flow_harness::run_tests_of(flow_harness::program("worker"));
}
