//! Finds NCCL and opens it, at run time and once per process.

use std::error::Error as _;
use std::ffi::{OsStr, OsString, c_int};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use flow_kernels::cuda::{MappedFile, mapped_files, nvidia_wheels};

use super::sys;

/// The oldest NCCL with all that is needed: the first with `ncclCommSplit`.
const OLDEST: Version = Version { major: 2, minor: 18, patch: 0 };

/// The NCCL of this process.
pub struct Library {
    pub(crate) nccl: sys::Nccl,
    pub(super) registration: Option<sys::Registration>,
    version: Version,
    path: PathBuf,
}

/// Why there is no NCCL: what was found where, what is wrong with it and what to do.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "no NCCL {OLDEST} or newer ({0}): install one (pip install nvidia-nccl-cu13; Debian, Ubuntu: NVIDIA's libnccl2) \
     and, where it is not found by itself, set FLOW_NCCL_PATH to its libnccl.so.2; `flow-launch doctor` says more"
)]
/// No usable NCCL was found, for this reason.
pub struct LibraryError(String);

/// A version of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl Library {
    /// Finds the NCCL of this process, once. It is the first of these that is new enough: the one
    /// that libtorch has loaded, the system's, that of PyTorch's wheels, or `FLOW_NCCL_PATH`'s.
    /// PyTorch's wheels have it beside the loaded libtorch. One that is loaded is the only one.
    ///
    /// # Errors
    /// No usable NCCL: what was found where, and why it was refused.
    pub fn get() -> Result<&'static Library, LibraryError> {
        static FOUND: OnceLock<Result<Library, LibraryError>> = OnceLock::new();
        FOUND.get_or_init(find).as_ref().map_err(Clone::clone)
    }

    /// Returns its version, which is that of its `ncclGetVersion`.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Returns the file that it was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it can allocate and register memory (since 2.19).
    pub fn has_registration(&self) -> bool {
        self.registration.is_some()
    }

    fn open(name: &OsStr) -> Result<Library, String> {
        // SAFETY: what NCCL runs when loaded asks nothing of its user, nor does what it runs when
        // unloaded: if it is refused, nothing of it was used but ncclGetVersion.
        let library = unsafe { libloading::Library::new(name) }.map_err(reason)?;
        let mut code: c_int = 0;
        // SAFETY: ncclGetVersion has had this signature in all versions, and only writes the
        // number.
        let (address, result) = unsafe {
            let get_version = library
                .get::<unsafe extern "C" fn(*mut c_int) -> sys::ncclResult_t>("ncclGetVersion")
                .map_err(reason)?;
            (*get_version as usize, get_version(&mut code))
        };
        let version = Version::from_code(code.unsigned_abs());
        let path = file_at(address).unwrap_or_else(|| name.into());
        if result != sys::ncclResult_t::ncclSuccess {
            return Err(format!("{} does not tell its version", path.display()));
        }
        if version < OLDEST {
            return Err(format!("{} is {version}", path.display()));
        }
        Ok(Library {
            // SAFETY: the functions are NCCL's own, whose ABI is stable within version 2.
            nccl: unsafe { sys::Nccl::from_library(library) }.map_err(|error| {
                format!("{} is {version} but incomplete: {}", path.display(), reason(error))
            })?,
            // SAFETY: as above.
            registration: unsafe { sys::Registration::new(name) }.ok(),
            version,
            path,
        })
    }
}

impl Version {
    /// Reads NCCL's number for a version: 2804 is 2.8.4, and since 2.9 there are two digits for the
    /// minor version.
    fn from_code(code: u32) -> Version {
        let unit = if code < 10_000 { 1_000 } else { 10_000 };
        Version { major: code / unit, minor: code % unit / 100, patch: code % 100 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

fn find() -> Result<Library, LibraryError> {
    let mut refused = Vec::new();
    for (origin, name) in candidates() {
        match Library::open(&name) {
            Ok(library) => return Ok(library),
            Err(reason) => refused.push(format!("{origin}{reason}")),
        }
    }
    Err(LibraryError(refused.join("; ")))
}

/// Returns the files that may be NCCL, and for messages where each is from.
fn candidates() -> Vec<(&'static str, OsString)> {
    for MappedFile { path, .. } in mapped_files() {
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnccl.so")) {
            // libtorch's: there must not be two in a process.
            return vec![("loaded already: ", path.into())];
        }
    }
    let mut names = vec![("", "libnccl.so.2".into()), ("", "libnccl.so".into())];
    if let Some(nvidia) = nvidia_wheels() {
        names.push(("", nvidia.join("nccl/lib/libnccl.so.2").into()));
    }
    let path = std::env::var_os("FLOW_NCCL_PATH").filter(|path| !path.is_empty());
    names.extend(path.map(|path| ("FLOW_NCCL_PATH: ", path)));
    names
}

/// Returns the reason that the dynamic loader gives.
fn reason(error: libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// Returns the file that is mapped at `address`.
fn file_at(address: usize) -> Option<PathBuf> {
    let file = mapped_files().into_iter().find(|file| file.addresses.contains(&address));
    file.map(|file| file.path)
}
