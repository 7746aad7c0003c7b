//! Named tensors as safetensors files.

use std::path::Path;

use flow_autograd::global::is_global;
use safetensors::{Dtype, SafeTensors};
use tch::{Device, Kind, Tensor};

/// Writes `tensors` to the file `path`. The error is the tensor's name, or else the file's, and the
/// reason.
pub fn write(tensors: &[(String, Tensor)], path: &Path) -> Result<(), (String, String)> {
    let on_cpu = |(name, tensor): &(String, Tensor)| {
        let unfit = |reason: String| (name.clone(), first_line(&reason));
        if tensor.is_sparse() {
            return Err(unfit("it is sparse, which safetensors cannot keep; make it dense".into()));
        }
        if is_global(tensor) && flow_autograd::data_ptr(tensor).is_null() {
            return Err(unfit(SHARDED.into()));
        }
        let kind = tensor.kind();
        if Dtype::try_from(kind).is_err() {
            return Err(unfit(format!("it is of kind {kind:?}, which safetensors cannot keep")));
        }
        let copy = tensor
            .f_detach()
            .and_then(|tensor| tensor.f_to_device(Device::Cpu))
            .and_then(|tensor| tensor.f_resolve_conj()?.f_resolve_neg()?.f_contiguous());
        Ok((name.clone(), copy.map_err(|error| unfit(error.to_string()))?))
    };
    let tensors = tensors.iter().map(on_cpu).collect::<Result<Vec<_>, _>>()?;
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    Tensor::write_safetensors(&tensors, path)
        .map_err(|error| (file.into_owned(), first_line(&error.to_string())))
}

/// The tensors in the bytes of such a file, on the CPU.
pub fn read(bytes: &[u8]) -> Result<Vec<(String, Tensor)>, String> {
    let tensors = SafeTensors::deserialize(bytes).map_err(|error| format!("{error:?}"))?;
    let tensor = |(name, view): (String, safetensors::tensor::TensorView)| {
        let shape: Vec<i64> = view.shape().iter().map(|&length| length as i64).collect();
        let kind = Kind::try_from(view.dtype());
        let kind = kind.map_err(|_| format!("{name} is of type {:?}", view.dtype()))?;
        let tensor = Tensor::f_from_data_size(view.data(), &shape, kind);
        Ok((name, tensor.map_err(|error| first_line(&error.to_string()))?))
    };
    tensors.tensors().into_iter().map(tensor).collect()
}

/// Why a global tensor without memory of its own is not kept.
const SHARDED: &str = "it is a global tensor, and no rank has all of it; use \
                       flow::global::checkpoint::ShardedCheckpoints, where each rank saves its part";

/// libtorch's texts have many lines: the first says what is wrong.
fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}
