//! The fakes of CUDA and NCCL: see `tests/fake-cuda`.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use flow_harness::{Process, TEST_TIMEOUT, program};

/// The folder of the fake CUDA driver, its fake compiler and the fake NCCL; see `fake-cuda`.
pub const FAKE_CUDA: &str = env!("FLOW_FAKE");

/// Has `command` use the fakes, with eight GPUs.
pub fn use_fake_cuda(command: &mut Command) {
    command
        .env("LD_LIBRARY_PATH", FAKE_CUDA)
        .env("FLOW_NCCL_PATH", Path::new(FAKE_CUDA).join("libnccl_fake.so"))
        .env("FLOW_FAKE_GPUS", "8");
    // What the fake compiler makes is of no use to others.
    command.env("FLOW_CACHE", Path::new(FAKE_CUDA).join("cache")).env_remove("FLOW_NVRTC");
}

/// Whether programs find the fake NCCL before any other; says so if not.
pub fn fake_cuda_is_found() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let mut which = Command::new(program("worker"));
        use_fake_cuda(which.arg("--nccl"));
        let found = Process::start(which).finish(TEST_TIMEOUT).success();
        let is_fake = found.contains("libnccl_fake");
        if !is_fake {
            println!(
                "SKIPPED: NCCL groups on the fake NCCL: this machine has an NCCL of its own, {}",
                found.trim()
            );
        }
        is_fake
    })
}

/// Has `command` use the fakes; None where another NCCL is found before the fake one.
pub fn on_fake_cuda(mut command: Command) -> Option<Command> {
    fake_cuda_is_found().then(|| {
        use_fake_cuda(&mut command);
        command
    })
}
