//! Lets the workers find libtorch where they were built, and says which version it is.

use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let Ok(libtorch) = std::env::var("DEP_TCH_LIBTORCH_LIB") else { return };
    println!("cargo:rustc-link-arg=-Wl,-rpath,{libtorch}");
    let version = version(&Path::new(&libtorch).with_file_name("include"))
        .unwrap_or_else(|| "unknown".into());
    println!("cargo:rustc-env=LIBTORCH_VERSION={version}");
}

/// "2.11.0", as libtorch's headers say.
fn version(include: &Path) -> Option<String> {
    let header = std::fs::read_to_string(include.join("torch/headeronly/version.h")).ok()?;
    let number = |part: &str| {
        let define = format!("#define TORCH_VERSION_{part} ");
        header
            .lines()
            .find_map(|line| line.strip_prefix(&define))
            .map(|number| number.trim().to_owned())
    };
    Some([number("MAJOR")?, number("MINOR")?, number("PATCH")?].join("."))
}
