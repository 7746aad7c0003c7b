//! Compiles the shim against the libtorch that torch-sys found.

use std::path::PathBuf;

/// The files of each translation unit. To read libtorch's headers takes longer than to compile what
/// follows them, so one unit has many files.
const UNITS: [(&str, &[&str]); 2] = [
    (
        "shim",
        &[
            "allocated.cpp",
            "hooks.cpp",
            "gradient.cpp",
            "graph.cpp",
            "random.cpp",
            "replace.cpp",
            "function.cpp",
            "batch_norm.cpp",
            "memory.cpp",
            "transient.cpp",
            "allocator.cpp",
            "optimizer.cpp",
        ],
    ),
    (
        "global",
        &[
            "global/tensor.cpp",
            "global/schema.cpp",
            "global/key.cpp",
            "global/unboxed.cpp",
            "global/call.cpp",
            "global/ffi.cpp",
        ],
    ),
];

fn main() {
    println!("cargo:rerun-if-changed=src/shim");
    if std::env::var_os("DOCS_RS").is_some() {
        return; // it has no libtorch, and links nothing
    }
    let Some(libraries) = std::env::var_os("DEP_TCH_LIBTORCH_LIB").map(PathBuf::from) else {
        println!("cargo::error=torch-sys names no libtorch; run scripts/setup");
        return;
    };
    let include = libraries.with_file_name("include");
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").files(UNITS.map(|(name, files)| unit(name, files)));
    // As system headers, so that the compiler's warnings are about the shim only.
    for folder in [include.join("torch/csrc/api/include"), include] {
        build.flag("-isystem").flag(folder);
    }
    build.debug(false); // libtorch's headers would add 90 MB to every program
    build.compile("flow_autograd_shim");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", libraries.display()); // for this package's tests
}

/// Writes the translation unit of these files; returns its path.
fn unit(name: &str, files: &[&str]) -> PathBuf {
    let variable = |name| PathBuf::from(std::env::var_os(name).expect("cargo sets it"));
    let shim = variable("CARGO_MANIFEST_DIR").join("src/shim");
    let includes = files.iter().map(|file| format!("#include \"{}\"\n", shim.join(file).display()));
    let path = variable("OUT_DIR").join(name).with_extension("cpp");
    std::fs::write(&path, includes.collect::<String>()).expect("cargo's folder can be written");
    path
}
