//! Tells the programs that depend on this crate where libtorch is, as `DEP_FLOW_LIBTORCH` in their
//! build scripts, and lets this crate's own tests find it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if let Ok(libtorch) = std::env::var("DEP_TCH_LIBTORCH_LIB") {
        println!("cargo:libtorch={libtorch}");
        println!("cargo:rustc-link-arg=-Wl,-rpath,{libtorch}");
    }
}
