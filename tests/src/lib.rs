//! What the multi-process tests share beside the harness: CPUs' instruction sets, and the fakes of
//! CUDA and NCCL.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

pub use flow_harness::*;

pub mod registry;

/// The instruction sets that libtorch has kernels for: the variables by which it, MKL and oneDNN
/// behave as on a CPU that has no better one. Those that this CPU lacks are left out, with a
/// printed reason.
pub fn instruction_sets() -> Vec<[(&'static str, &'static str); 3]> {
    let variables = |aten, mkl, onednn| {
        [
            ("ATEN_CPU_CAPABILITY", aten),
            ("MKL_ENABLE_INSTRUCTIONS", mkl),
            ("ONEDNN_MAX_CPU_ISA", onednn),
        ]
    };
    let mut sets = vec![variables("default", "SSE4_2", "SSE41")];
    #[cfg(target_arch = "x86_64")]
    {
        let has_avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let has_avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        for (name, found, set) in [
            ("AVX2", has_avx2, variables("avx2", "AVX2", "AVX2")),
            ("AVX-512", has_avx2 && has_avx512, variables("avx512", "AVX512", "AVX512_CORE")),
        ] {
            if found {
                sets.push(set);
            } else {
                println!("SKIPPED: what depends on rounding, as libtorch computes with {name}: this CPU lacks it");
            }
        }
    }
    sets
}

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
