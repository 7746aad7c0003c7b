//! Checks `flow_kernels::cuda` on a GPU against a plain reference, bit for bit, or measures it.
//!
//! `cargo run --release -p flow-kernels --example cuda_check [-- --bench [--json]]`

mod bench;
mod check;
mod reference;

use std::env;
use std::process::ExitCode;
use std::sync::Arc;

use flow_kernels::DType;
use flow_kernels::cuda::{Device, DeviceBuffer, DeviceMemory, Error, FlatLayout};

fn main() -> ExitCode {
    match run(&env::args().skip(1).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cuda_check: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Any error ends the program.
type Outcome = Result<(), Box<dyn std::error::Error>>;

fn run(arguments: &[String]) -> Outcome {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let command: fn(&Arc<Device>) -> Outcome = match arguments[..] {
        [] => check::run,
        ["--bench"] => |device| bench::run(device, false),
        ["--bench", "--json"] => |device| bench::run(device, true),
        _ => return Err("usage: cuda_check [--bench [--json]]".into()),
    };
    if Device::count()? == 0 {
        return Err("this machine has no GPU".into());
    }
    command(&Device::open(0)?)
}

/// Elements in memory that others own as well.
struct View {
    memory: Arc<DeviceMemory>,
    dtype: DType,
    start: usize,
    length: usize,
}

impl View {
    /// All of `memory`.
    fn all(memory: &Arc<DeviceMemory>, dtype: DType) -> View {
        View { memory: memory.clone(), dtype, start: 0, length: memory.bytes() / dtype.size() }
    }

    /// The tensors of `layout` in `memory`, each moved on by `shift` elements.
    fn tensors(memory: &Arc<DeviceMemory>, layout: &FlatLayout, shift: usize) -> Vec<View> {
        let mut views = Vec::new();
        for (place, &length) in layout.places().iter().zip(layout.lengths()) {
            let memory = memory.clone();
            views.push(View { memory, dtype: layout.flat(), start: place + shift, length });
        }
        views
    }
}

// SAFETY: the elements lie within `memory`, whose `Drop` waits for all work.
unsafe impl DeviceBuffer for View {
    fn address(&self) -> u64 {
        self.memory.address() + (self.start * self.dtype.size()) as u64
    }

    fn bytes(&self) -> usize {
        self.length * self.dtype.size()
    }

    fn dtype(&self) -> DType {
        self.dtype
    }
}

/// Memory with this content.
fn upload(device: &Arc<Device>, content: &[u8]) -> Result<Arc<DeviceMemory>, Error> {
    let memory = DeviceMemory::allocate(device, content.len())?;
    memory.write(content)?;
    Ok(Arc::new(memory))
}
