//! Lets the tests find libtorch where they were built.

fn main() {
    if let Ok(libtorch) = std::env::var("DEP_TCH_LIBTORCH_LIB") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{libtorch}");
    }
}
