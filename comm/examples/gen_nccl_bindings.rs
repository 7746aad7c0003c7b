//! Makes `comm/src/nccl/sys.rs` from nccl.h; `scripts/gen-nccl-bindings` calls it.
//!
//! usage: gen_nccl_bindings FOLDER    nccl.h lies in FOLDER; prints the bindings
//!
//! LIBCLANG_PATH names the folder of libclang.so.

use std::path::Path;

/// At the top of the bindings, below bindgen's own line with its version.
const ABOUT: &str = "\
//! NCCL's C interface, as the nccl.h of version [`NCCL_VERSION_CODE`] has it: of [`Nccl`] a library
//! must have all functions, of [`Registration`] (since 2.19) all or none.
//!
//! Made by `scripts/gen-nccl-bindings`, not to be edited.
#![allow(missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals)]
#![allow(clippy::all, clippy::undocumented_unsafe_blocks)]";

const FUNCTIONS: &str = "GetVersion|GetUniqueId|GetErrorString|GetLastError|\
    Comm(InitRankConfig|Split|Finalize|Destroy|Abort|GetAsyncError|Count|UserRank)|\
    AllReduce|Reduce|Broadcast|AllGather|ReduceScatter|Send|Recv|GroupStart|GroupEnd";
const REGISTRATION: &str = "MemAlloc|MemFree|CommRegister|CommDeregister";
const CONSTANTS: &str = "VERSION_CODE|SPLIT_NOCOLOR|CONFIG_UNDEF_INT|UNIQUE_ID_BYTES";

/// All that nccl.h takes from CUDA's and the system's headers. With these, the bindings are the
/// same on every machine.
const STAND_INS: [(&str, &str); 3] = [
    ("cuda_runtime.h", "typedef __SIZE_TYPE__ size_t; typedef struct CUstream_st* cudaStream_t;"),
    ("cuda_fp16.h", ""),
    ("limits.h", "#define INT_MIN (-2147483647 - 1)"),
];

/// Makes the text of `sys.rs` from the nccl.h in folder `tools`.
pub fn bindings(tools: &Path) -> Result<String, String> {
    let tools = tools.canonicalize().map_err(|error| format!("{}: {error}", tools.display()))?;
    let functions = |names: &str, library: &str| {
        let mut builder = bindgen::builder();
        for (name, text) in STAND_INS {
            builder = builder.header_contents(&tools.join(name).to_string_lossy(), text);
        }
        builder
            .header(tools.join("nccl.h").to_string_lossy())
            .clang_args(["-nostdinc", "-I", &tools.to_string_lossy()])
            .allowlist_function(format!("nccl({names})"))
            .dynamic_library_name(library)
            .dynamic_link_require_all(true)
            .default_enum_style(bindgen::EnumVariation::NewType {
                is_bitfield: false,
                is_global: false,
            })
            .generate_comments(false)
            .wrap_unsafe_ops(true)
            .rustfmt_configuration_file(Some(
                Path::new(env!("CARGO_MANIFEST_DIR")).join("../rustfmt.toml"),
            ))
    };
    let parts = [
        functions(FUNCTIONS, "Nccl").allowlist_var(format!("NCCL_({CONSTANTS})")).raw_line(ABOUT),
        functions(REGISTRATION, "Registration").blocklist_type(".*").disable_header_comment(),
    ];
    parts
        .into_iter()
        .map(|part| Ok(part.generate().map_err(|error| error.to_string())?.to_string()))
        .collect()
}

fn main() -> Result<(), String> {
    let tools = std::env::args_os().nth(1).ok_or("usage: gen_nccl_bindings FOLDER")?;
    print!("{}", bindings(Path::new(&tools))?);
    Ok(())
}
