//! Compiles the libraries that fake CUDA and NCCL into a folder, whose name the tests find as
//! `FLOW_FAKE`.

use std::path::Path;

fn main() {
    let folder = Path::new(&std::env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("fake");
    std::fs::create_dir_all(&folder).expect("OUT_DIR can be written");
    let compile = |library: &str, sources: &[&str], link: &[&str]| {
        let mut compiler = cc::Build::new().cpp(true).get_compiler().to_command();
        compiler.args([
            "-std=c++17",
            "-O3",
            "-fPIC",
            "-shared",
            "-pthread",
            "-fvisibility=hidden",
            "-fno-strict-aliasing",
        ]);
        compiler.args(sources.iter().map(|source| Path::new("../fake-cuda").join(source)));
        // Their threads run until the process ends: they must stay loaded.
        compiler
            .arg("-Wl,-z,nodelete")
            .arg("-o")
            .arg(folder.join(library))
            .arg("-L")
            .arg(&folder)
            .args(link);
        let status = compiler.status().expect("there is a C++ compiler");
        assert!(status.success(), "{library} did not compile: {compiler:?}");
    };
    compile(
        "libcuda.so.1",
        &["cuda.cpp", "cuda_streams.cpp", "cuda_memory.cpp", "cuda_modules.cpp", "kernels.cpp"],
        &["-Wl,-soname,libcuda.so.1"],
    );
    compile("libnvrtc.so", &["nvrtc.cpp"], &[]);
    compile("libnccl_fake.so", &["nccl.cpp"], &["-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN"]);
    println!("cargo:rustc-env=FLOW_FAKE={}", folder.display());
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=../fake-cuda");
    println!("cargo:rerun-if-changed=../../kernels/src/cuda/pack.cu");
}
