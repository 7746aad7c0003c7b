//! Which NCCL a process finds, and what it says where there is none. Each case is a process of its
//! own.

use std::path::{Path, PathBuf};
use std::process::Command;

use flow_comm::nccl::Library;

/// In the process of a case: what is to be printed of the library that is found.
const CASE: &str = "FLOW_TEST_NCCL_CASE";
const NO_OTHER: [&str; 2] =
    ["libnccl.so.2: cannot open shared object file", "libnccl.so: cannot open shared object file"];

#[test]
fn case() {
    if std::env::var_os(CASE).is_none() {
        return;
    }
    match Library::get() {
        Ok(library) => {
            let id = library.unique_id().map(|id| id.to_bytes().iter().any(|byte| *byte != 0));
            let (version, path) = (library.version(), library.path().display());
            println!(
                "CASE {version} from {path}, registers: {}, makes ids: {id:?}",
                library.has_registration()
            );
        }
        Err(error) => {
            assert_eq!(error.to_string(), Library::get().err().unwrap().to_string());
            println!("CASE {error}");
        }
    }
}

/// What a process says of NCCL that has these variables.
fn says(variables: &[(&str, &Path)]) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["nccl_library::case", "--exact", "--nocapture"])
        .env_remove("LD_LIBRARY_PATH")
        .env_remove("FLOW_NCCL_PATH")
        .envs([(CASE, "1"), ("NCCL_SOCKET_IFNAME", "lo")])
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find_map(|line| Some(line.split_once("CASE ")?.1));
    line.unwrap_or_else(|| panic!("{output:?}")).to_string()
}

/// Whether the dynamic loader finds an NCCL by itself: then there is no process without.
fn is_installed() -> bool {
    !says(&[]).starts_with("no NCCL")
}

/// A library of `source`, which a C compiler makes.
fn compiled(name: &str, source: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).canonicalize().unwrap();
    let (source_file, library) = (folder.join(name).with_extension("c"), folder.join(name));
    std::fs::create_dir_all(library.parent().unwrap()).unwrap();
    std::fs::write(&source_file, source).unwrap();
    let compiler = Command::new(std::env::var_os("CC").unwrap_or("cc".into()))
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &source_file])
        .output()
        .unwrap();
    assert!(compiler.status.success(), "{compiler:?}");
    library
}

#[test]
fn is_found_by_flow_nccl_path() {
    let nccl = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cuda-tools/libnccl.so.2");
    let Ok(nccl) = nccl.canonicalize() else {
        println!("SKIPPED: opening the real NCCL: no libnccl.so.2 (scripts/setup --cuda-tools)");
        return;
    };
    let expected = format!("2.28.9 from {}, registers: true, makes ids: Ok(true)", nccl.display());
    assert_eq!(says(&[("LD_LIBRARY_PATH", nccl.parent().unwrap())]), expected);
    assert_eq!(says(&[("LD_PRELOAD", &nccl)]), expected, "as if libtorch had loaded it");
    if is_installed() {
        println!("SKIPPED: NCCL by FLOW_NCCL_PATH: this machine has another, which comes first");
        return;
    }
    assert_eq!(says(&[("FLOW_NCCL_PATH", &nccl)]), expected);
}

#[test]
fn says_why_there_is_none() {
    if is_installed() {
        println!("SKIPPED: errors without NCCL: this machine has one");
        return;
    }
    let version =
        |code| format!("int ncclGetVersion(int* version) {{ *version = {code}; return 0; }}\n");
    let foreign = compiled("libforeign.so", "int foreign;\n");
    let old = compiled("libold.so", &version(21003));
    let oldest = compiled("liboldest.so", &version(2804));
    let incomplete = compiled("libincomplete.so", &version(21805));
    let failing = compiled("libfailing.so", "int ncclGetVersion(int* version) { return 1; }\n");
    let libtorch = compiled("packages/torch/lib/libc10.so", "int libtorch;\n");
    let beside = compiled("packages/nvidia/nccl/lib/libnccl.so.2", &version(21602));
    let text = foreign.with_extension("c");
    let at = |path: &Path, what: &str| format!("; FLOW_NCCL_PATH: {}{what}", path.display());
    let cases: [(&[(&str, &Path)], String); 10] = [
        (&[], "libnccl.so: cannot open shared object file: No such file or directory)".to_string()),
        (&[("LD_PRELOAD", &libtorch)], format!("; {} is 2.16.2)", beside.display())),
        (&[("FLOW_NCCL_PATH", Path::new(""))], "No such file or directory)".to_string()),
        (
            &[("FLOW_NCCL_PATH", Path::new("/no/such"))],
            at(Path::new("/no/such"), ": cannot open shared object file"),
        ),
        (&[("FLOW_NCCL_PATH", &text)], at(&text, ": ")),
        (&[("FLOW_NCCL_PATH", &foreign)], at(&foreign, ": undefined symbol: ncclGetVersion)")),
        (&[("FLOW_NCCL_PATH", &old)], at(&old, " is 2.10.3)")),
        (&[("FLOW_NCCL_PATH", &oldest)], at(&oldest, " is 2.8.4)")),
        (&[("FLOW_NCCL_PATH", &incomplete)], at(&incomplete, " is 2.18.5 but incomplete: ")),
        (&[("FLOW_NCCL_PATH", &failing)], at(&failing, " does not tell its version)")),
    ];
    for (variables, expected) in cases {
        let error = says(variables);
        assert!(error.starts_with("no NCCL 2.18.0 or newer ("), "{error}");
        assert!(NO_OTHER.iter().all(|reason| error.contains(reason)), "{error}");
        assert!(error.contains(&expected), "{error}\nlacks {expected}");
        assert!(error.ends_with("libnccl.so.2; `flow-launch doctor` says more"), "{error}");
    }
}

/// Even if it is of no use: two in one process would be worse.
#[test]
fn the_one_that_is_loaded_is_the_only_one() {
    let version =
        |code| format!("int ncclGetVersion(int* version) {{ *version = {code}; return 0; }}\n");
    let loaded = compiled("loaded/libnccl.so.2", &version(21602));
    let other = compiled("libother.so", &version(22809));
    let error = says(&[("LD_PRELOAD", &loaded), ("FLOW_NCCL_PATH", &other)]);
    let expected =
        format!("no NCCL 2.18.0 or newer (loaded already: {} is 2.16.2)", loaded.display());
    assert!(error.starts_with(&expected), "{error}");
}
