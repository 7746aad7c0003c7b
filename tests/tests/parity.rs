//! `Ddp` makes of a model, bit for bit, what PyTorch's DistributedDataParallel does.

use flow_tests::{launcher, Process, TEST_TIMEOUT};
use serde_json::Value;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/data/parity/models.json");

fn agrees_with_pytorch(mode: Option<(&str, &str)>) {
    let stored: Value = serde_json::from_str(&std::fs::read_to_string(FILE).unwrap()).unwrap();
    let version = env!("LIBTORCH_VERSION");
    if stored["torch"] != version {
        println!(
            "SKIPPED: parity with PyTorch: its results are those of {}, this is {version}",
            stored["torch"]
        );
        return;
    }
    let mut command = launcher(2, &[], "check_parity", &[FILE]);
    let environment = stored["environment"].as_object().unwrap();
    command
        .envs(environment.iter().map(|(name, value)| (name, value.as_str().unwrap())))
        .envs(mode);
    assert_eq!(Process::start(command).finish(TEST_TIMEOUT).success(), "9 trainings agree\n");
}

#[test]
fn in_place() {
    agrees_with_pytorch(None);
}

#[test]
fn by_copies() {
    agrees_with_pytorch(Some(("FLOW_DDP_COPY", "1")));
}

#[test]
fn by_a_thread() {
    agrees_with_pytorch(Some(("FLOW_DDP_PROGRESS", "thread")));
}
