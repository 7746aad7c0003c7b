//! Compiles the shim against the libtorch that torch-sys found.

use std::path::PathBuf;

const SOURCES: [&str; 15] = [
    "allocated.cpp",
    "hooks.cpp",
    "gradient.cpp",
    "graph.cpp",
    "random.cpp",
    "function.cpp",
    "memory.cpp",
    "allocator.cpp",
    "optimizer.cpp",
    "global/tensor.cpp",
    "global/schema.cpp",
    "global/key.cpp",
    "global/unboxed.cpp",
    "global/call.cpp",
    "global/ffi.cpp",
];

fn main() {
    println!("cargo:rerun-if-changed=src/shim");
    let Some(libraries) = std::env::var_os("DEP_TCH_LIBTORCH_LIB").map(PathBuf::from) else {
        println!("cargo::error=torch-sys names no libtorch; run scripts/setup");
        return;
    };
    let include = libraries.with_file_name("include");
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").files(SOURCES.map(|name| PathBuf::from("src/shim").join(name)));
    // As system headers, so that the compiler's warnings are about the shim only.
    for folder in [include.join("torch/csrc/api/include"), include] {
        build.flag("-isystem").flag(folder);
    }
    build.debug(false); // libtorch's headers would add 90 MB to every program
    build.compile("flow_autograd_shim");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", libraries.display()); // for this package's tests
}
