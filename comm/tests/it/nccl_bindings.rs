//! The bindings that are checked in are those that nccl.h gives.

use std::path::Path;

use flow_harness::runs_apart;

#[path = "../../examples/gen_nccl_bindings.rs"]
#[allow(dead_code)] // its main
mod gen_nccl_bindings;

#[test]
fn are_up_to_date() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let tools = folder.join("../.cuda-tools");
    if runs_apart(are_up_to_date, &[("LIBCLANG_PATH", &tools.to_string_lossy())]) {
        return;
    }
    for file in ["nccl.h", "libclang.so"] {
        if !tools.join(file).exists() {
            println!(
                "SKIPPED: regenerating the NCCL bindings: no {file} (scripts/setup --cuda-tools)"
            );
            return;
        }
    }
    let current = std::fs::read_to_string(folder.join("src/nccl/sys.rs")).unwrap();
    // Not assert_eq: the texts are long.
    assert!(
        gen_nccl_bindings::bindings(&tools).unwrap() == current,
        "run scripts/gen-nccl-bindings"
    );
}
