//! Which file of a checkpoint has which tensor: one file, or several and an index, as Hugging Face
//! lays models out.

use std::collections::BTreeMap;
use std::io;

use serde_json::json;

use super::safetensors::{Header, size};

/// A file of tensors.
pub struct TensorFile {
    /// Its name.
    pub name: String,
    /// The tensors.
    pub header: Header,
    /// The bytes before the first tensor.
    pub head: Vec<u8>,
}

/// What all ranks write together of a tensor: its type and its shape.
pub type Described = (String, Vec<usize>);

/// Lays tensors out in files of at most so many bytes, unless one tensor has more. The files are
/// named `stem.safetensors`, or `stem-00001-of-00003.safetensors` and so on.
///
/// # Errors
/// The name of the tensor that no file can have, and the reason.
pub fn lay_out(
    stem: &str,
    tensors: &BTreeMap<String, Described>,
    most: u64,
) -> Result<Vec<TensorFile>, String> {
    let mut files = vec![Vec::new()];
    let mut bytes = 0;
    for (name, (dtype, shape)) in tensors {
        let own = size(dtype, shape).unwrap_or_default() as u64;
        if bytes > 0 && bytes + own > most {
            files.push(Vec::new());
            bytes = 0;
        }
        bytes += own;
        if let Some(file) = files.last_mut() {
            file.push((name.clone(), &dtype[..], &shape[..]));
        }
    }
    let count = files.len();
    let mut laid_out = Vec::with_capacity(count);
    for (number, tensors) in files.into_iter().enumerate() {
        let name = if count == 1 {
            format!("{stem}.safetensors")
        } else {
            format!("{stem}-{:05}-of-{count:05}.safetensors", number + 1)
        };
        let mut header = Header::of(tensors)?;
        // Some of PyTorch's users ask for it.
        header.metadata.insert("format".into(), "pt".into());
        let head = header.to_bytes().map_err(|error: io::Error| error.to_string())?;
        laid_out.push(TensorFile { name, header, head });
    }
    Ok(laid_out)
}

/// Returns the name and the text of the index of several files.
pub fn index(stem: &str, files: &[TensorFile]) -> Option<(String, Vec<u8>)> {
    if files.len() == 1 {
        return None;
    }
    let mut weight_map = BTreeMap::new();
    let mut total_size = 0;
    for TensorFile { name, header, .. } in files {
        for (tensor, info) in &header.tensors {
            weight_map.insert(tensor, name);
            total_size += info.data_offsets.1 - info.data_offsets.0;
        }
    }
    let index = json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
    Some((format!("{stem}.safetensors.index.json"), format!("{index:#}\n").into_bytes()))
}

/// Returns whether a file of this name has tensors of `stem`.
pub fn is_of(stem: &str, name: &str) -> bool {
    let rest = name.strip_prefix(stem).and_then(|rest| rest.strip_suffix(".safetensors"));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}
