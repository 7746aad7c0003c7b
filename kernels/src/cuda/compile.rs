//! Compiles `pack.cu` at run time, and keeps the results in the user's cache folder.

use std::ffi::{CStr, c_char, c_int};
use std::path::Path;
use std::ptr::{null, null_mut};

use super::cache;
use super::error::{Error, Result};
use super::library::{Nvrtc, Program, load_compiler};
use crate::digest;
use crate::types::DType;

/// The kernels, as a C string.
const SOURCE: &str = concat!(include_str!("pack.cu"), "\0");

/// Compiles the kernels between tensors of type `tensors` and a flat buffer of type `flat`, for
/// GPUs of `architecture` (90 for `sm_90`). The result is a cubin, or PTX where NVRTC is older than
/// the GPU. Whichever it is, the driver can load it.
///
/// Results are kept below `$FLOW_CACHE`, else `$XDG_CACHE_HOME/flow`, else `~/.cache/flow`, in the
/// folder `kernels`. A cache that does not work costs time only.
///
/// # Errors
///
/// [`Error::Argument`] if a type is not a floating-point one, [`Error::NoCompiler`],
/// [`Error::Compile`].
pub fn compile(tensors: DType, flat: DType, architecture: u32) -> Result<Vec<u8>> {
    for dtype in [tensors, flat] {
        if !matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16) {
            return Err(Error::Argument(format!(
                "there is no kernel that packs {dtype}: use f32, f64, f16 or bf16"
            )));
        }
    }
    compile_with(load_compiler()?, cache::folder().as_deref(), tensors, flat, architecture)
}

/// Returns the kernel's name in the compiled code.
pub(super) fn kernel_name(operation: &str, from: DType, to: DType) -> String {
    format!("{operation}_{from}_{to}")
}

fn compile_with(
    nvrtc: &Nvrtc,
    cache: Option<&Path>,
    tensors: DType,
    flat: DType,
    architecture: u32,
) -> Result<Vec<u8>> {
    let compiler = Compiler { nvrtc, kernel: kernel_name("pack", tensors, flat) };
    let (target, form) = compiler.target(architecture)?;
    let options = [
        format!("--gpu-architecture={target}\0"),
        "--std=c++17\0".into(),
        format!("-DTENSORS={tensors}\0"),
        format!("-DFLAT={flat}\0"),
    ];
    let file = match cache {
        Some(folder) => Some(folder.join(format!(
            "{}-{target}-{:016x}",
            compiler.kernel,
            compiler.key(&options)?
        ))),
        None => None,
    };
    if let Some(image) = file.as_deref().and_then(cache::read) {
        return Ok(image);
    }
    let image = compiler.run(&options, form)?;
    if let Some(file) = file
        && let Err(error) = cache::write(&file, &image)
    {
        log::debug!("{} cannot be kept: {error}", file.display());
    }
    Ok(image)
}

/// The form in which a compiled program is taken.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    Cubin,
    Ptx,
}

/// NVRTC, compiling the kernel of this name.
struct Compiler<'a> {
    nvrtc: &'a Nvrtc,
    kernel: String,
}

impl Compiler<'_> {
    fn error(&self, log: String) -> Error {
        Error::Compile { kernel: self.kernel.clone(), log }
    }

    fn check(&self, result: c_int) -> Result<()> {
        if result == 0 {
            return Ok(());
        }
        // SAFETY: the function gives a static text for any number.
        let text = unsafe { CStr::from_ptr((self.nvrtc.nvrtcGetErrorString)(result)) };
        Err(self.error(text.to_string_lossy().into_owned()))
    }

    /// Returns the architecture to compile for: the GPU's own or, where NVRTC does not know it, the
    /// newest before it.
    fn target(&self, architecture: u32) -> Result<(String, Form)> {
        let mut count = 0;
        // SAFETY: what is written is there to be written, and `supported` is as long as the first
        // call says.
        let supported = unsafe {
            self.check((self.nvrtc.nvrtcGetNumSupportedArchs)(&mut count))?;
            let mut supported = vec![0; usize::try_from(count).unwrap_or(0)];
            self.check((self.nvrtc.nvrtcGetSupportedArchs)(supported.as_mut_ptr()))?;
            supported
        };
        match supported
            .iter()
            .map(|&known| known as u32)
            .filter(|&known| known <= architecture)
            .max()
        {
            Some(known) if known == architecture => Ok((format!("sm_{known}"), Form::Cubin)),
            Some(known) => Ok((format!("compute_{known}"), Form::Ptx)),
            None => Err(self.error(format!(
                "this NVRTC is too new for sm_{architecture}; install that of CUDA 12"
            ))),
        }
    }

    /// Returns a number that is another one whenever the compiled code might be.
    fn key(&self, options: &[String]) -> Result<u64> {
        let mut major = 0;
        let mut minor = 0;
        // SAFETY: both are there to be written.
        self.check(unsafe { (self.nvrtc.nvrtcVersion)(&mut major, &mut minor) })?;
        Ok(digest(&(SOURCE, options, major, minor)))
    }

    fn run(&self, options: &[String], form: Form) -> Result<Vec<u8>> {
        let nvrtc = self.nvrtc;
        let options: Vec<*const c_char> =
            options.iter().map(|option| option.as_ptr().cast()).collect();
        let mut program = null_mut();
        // SAFETY: all texts end with a zero and live as long as the program, which `destroy` ends;
        // the sizes that `output` reads are those of what it then asks for.
        unsafe {
            self.check((nvrtc.nvrtcCreateProgram)(
                &mut program,
                SOURCE.as_ptr().cast(),
                c"pack.cu".as_ptr(),
                0,
                null(),
                null(),
            ))?;
            let compiled =
                (nvrtc.nvrtcCompileProgram)(program, options.len() as c_int, options.as_ptr());
            let image = match (compiled, form) {
                (0, Form::Cubin) => {
                    self.output(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
                }
                (0, Form::Ptx) => self.output(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX),
                (failed, _) => self
                    .output(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
                    .and_then(|log| {
                        self.check(failed).map_err(|error| {
                            self.error(format!("{error}: {}", String::from_utf8_lossy(&log)))
                        })?;
                        Ok(log)
                    }),
            };
            self.check((nvrtc.nvrtcDestroyProgram)(&mut program))?;
            image
        }
    }

    /// # Safety
    ///
    /// `size` and `get` must belong together, and `program` must have been compiled.
    unsafe fn output(
        &self,
        program: Program,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        get: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: the caller's promise; `output` is as long as `size` says.
        unsafe {
            self.check(size(program, &mut bytes))?;
            let mut output = vec![0; bytes];
            self.check(get(program, output.as_mut_ptr().cast()))?;
            Ok(output)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{env, fs};

    use super::*;

    const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

    /// Returns NVRTC, unless this machine has none.
    fn nvrtc() -> Option<&'static Nvrtc> {
        match load_compiler() {
            Ok(nvrtc) => Some(nvrtc),
            Err(Error::NoCompiler { .. }) if env::var_os("FLOW_NVRTC").is_none() => {
                println!(
                    "SKIPPED: compiling the CUDA kernels: no libnvrtc (scripts/test takes \
                     .cuda-tools)"
                );
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn contains(image: &[u8], name: &str) -> bool {
        image.windows(name.len()).any(|part| part == name.as_bytes())
    }

    #[test]
    fn every_pair_of_types_compiles_for_every_architecture() {
        let Some(nvrtc) = nvrtc() else { return };
        for (tensors, flat) in FLOATS.iter().flat_map(|&tensors| FLOATS.map(|flat| (tensors, flat)))
        {
            for architecture in [80, 90, 100] {
                let image = compile_with(nvrtc, None, tensors, flat, architecture).unwrap();
                assert!(image.starts_with(b"\x7fELF"), "{tensors} {flat} sm_{architecture}");
                assert!(contains(&image, &kernel_name("pack", tensors, flat)));
                assert!(contains(&image, &kernel_name("unpack", flat, tensors)));
            }
        }
    }

    #[test]
    fn a_gpu_newer_than_nvrtc_gets_ptx() {
        let Some(nvrtc) = nvrtc() else { return };
        let image = compile_with(nvrtc, None, DType::F32, DType::BF16, 999).unwrap();
        assert!(contains(&image, ".visible .entry pack_f32_bf16("));
        assert_eq!(image.last(), Some(&0), "the driver needs a zero at the end");
    }

    #[test]
    fn a_gpu_too_old_for_nvrtc_is_an_error() {
        let Some(nvrtc) = nvrtc() else { return };
        let error = compile_with(nvrtc, None, DType::F32, DType::BF16, 10).unwrap_err().to_string();
        assert!(error.contains("pack_f32_bf16") && error.contains("sm_10"), "{error}");
    }

    #[test]
    fn what_nvrtc_says_is_in_the_error() {
        let Some(nvrtc) = nvrtc() else { return };
        let compiler = Compiler { nvrtc, kernel: "pack_f32_x".into() };
        let error = compiler
            .run(&["-DTENSORS=f32\0".into(), "-DFLAT=x\0".into()], Form::Ptx)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("pack_f32_x") && error.contains("identifier \"x\" is undefined"),
            "{error}"
        );
    }

    #[test]
    fn compiled_kernels_are_kept_and_damaged_ones_are_not_used() {
        let Some(nvrtc) = nvrtc() else { return };
        let cache = tempfile::tempdir().unwrap();
        let folder = cache.path().join("made/when/needed");
        let compile = || compile_with(nvrtc, Some(&folder), DType::BF16, DType::F32, 90).unwrap();
        let image = compile();
        let files: Vec<_> =
            fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        let [file] = &files[..] else { panic!("{files:?}") };

        // What is in the file is what is used, as long as it is whole.
        cache::write(file, b"kept").unwrap();
        assert_eq!(compile(), b"kept");
        let whole = fs::read(file).unwrap();
        for damaged in [&b""[..], &whole[..whole.len() - 1], &image[..image.len() / 2], &image] {
            fs::write(file, damaged).unwrap();
            assert!(compile() == image);
            assert!(cache::read(file).is_some_and(|kept| kept == image));
        }
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_no_error() {
        let Some(nvrtc) = nvrtc() else { return };
        let file = tempfile::NamedTempFile::new().unwrap();
        let image =
            compile_with(nvrtc, Some(&file.path().join("folder")), DType::F32, DType::F32, 90)
                .unwrap();
        assert!(image.starts_with(b"\x7fELF"));
    }

    #[test]
    fn integers_cannot_be_packed() {
        let error = compile(DType::F32, DType::I32, 90).unwrap_err();
        assert!(matches!(&error, Error::Argument(text) if text.contains("i32")), "{error}");
    }
}
