//! Named tensors as safetensors files.

use std::path::Path;

use flow_autograd::global::is_global;
use safetensors::{Dtype, SafeTensors};
use tch::{Device, Kind, Tensor};

/// Writes `tensors` to the file `path`. The error is the tensor's name, or else the file's, and the
/// reason.
pub fn write(tensors: &[(String, Tensor)], path: &Path) -> Result<(), (String, String)> {
    let mut copies = Vec::new();
    for (name, tensor) in tensors {
        let copy = on_cpu(tensor).map_err(|reason| (name.clone(), first_line(&reason)))?;
        copies.push((name, copy));
    }
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    Tensor::write_safetensors(&copies, path)
        .map_err(|error| (file.into_owned(), first_line(&error.to_string())))
}

/// Checks that tensors can be kept. The error is the first one's name that cannot, and the reason.
pub fn check(tensors: &[(String, Tensor)]) -> Result<(), (String, String)> {
    for (name, tensor) in tensors {
        check_one(tensor).map_err(|reason| (name.clone(), reason))?;
    }
    Ok(())
}

fn check_one(tensor: &Tensor) -> Result<(), String> {
    if tensor.is_sparse() {
        return Err("it is sparse, which safetensors cannot keep; make it dense".into());
    }
    if is_global(tensor) && flow_autograd::data_ptr(tensor).is_null() {
        return Err(SHARDED.into());
    }
    let kind = tensor.kind();
    if Dtype::try_from(kind).is_err() {
        return Err(format!("it is of kind {kind:?}, which safetensors cannot keep"));
    }
    Ok(())
}

/// Returns the tensor as a file has it: on the CPU, without gaps. The error is why it cannot be
/// kept.
fn on_cpu(tensor: &Tensor) -> Result<Tensor, String> {
    check_one(tensor)?;
    tensor
        .f_detach()
        .and_then(|tensor| tensor.f_to_device(Device::Cpu))
        .and_then(|tensor| flow_autograd::resolved(&tensor).unwrap_or(tensor).f_contiguous())
        .map_err(|error| error.to_string())
}

/// Returns the tensors in the bytes of such a file, on the CPU.
pub fn read(bytes: &[u8]) -> Result<Vec<(String, Tensor)>, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|error| format!("{error:?}"))?;
    let mut tensors = Vec::new();
    for (name, view) in file.tensors() {
        let shape: Vec<i64> = view.shape().iter().map(|&length| length as i64).collect();
        let kind = Kind::try_from(view.dtype())
            .map_err(|_| format!("{name} is of type {:?}", view.dtype()))?;
        let tensor = Tensor::f_from_data_size(view.data(), &shape, kind)
            .map_err(|error| first_line(&error.to_string()))?;
        tensors.push((name, tensor));
    }
    Ok(tensors)
}

/// Why a global tensor without memory of its own is not kept.
const SHARDED: &str = "it is a global tensor, and no rank has all of it; use \
                       flow::global::checkpoint::ShardedCheckpoints, where each rank saves its part";

/// libtorch's texts have many lines: the first says what is wrong.
fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}
