//! What the multi-process tests share beside the harness: CPUs' instruction sets.

pub use flow_harness::*;
pub use flow_scenarios::{fakes::*, registry, top};

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
                println!(
                    "SKIPPED: what depends on rounding, as libtorch computes with {name}: this \
                     CPU lacks it"
                );
            }
        }
    }
    sets
}
