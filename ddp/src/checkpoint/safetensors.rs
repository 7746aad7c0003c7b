//! The head of a safetensors file. It is the length of a JSON header in 8 bytes, and the header.
//! That says where in the rest of the file each tensor's elements are.
//!
//! The crate `safetensors` reads and writes files that are in memory as a whole. The version that
//! tch uses knows neither complex numbers nor 8-bit floats. Here a file is written tensor by
//! tensor, and read in pieces.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};
use tch::Kind;

/// The kinds that both libtorch and safetensors have, and what safetensors calls them.
pub const DTYPES: [(Kind, &str); 13] = [
    (Kind::Bool, "BOOL"),
    (Kind::Uint8, "U8"),
    (Kind::Int8, "I8"),
    (Kind::Int16, "I16"),
    (Kind::Int, "I32"),
    (Kind::Int64, "I64"),
    (Kind::Float8e5m2, "F8_E5M2"),
    (Kind::Float8e4m3fn, "F8_E4M3"),
    (Kind::BFloat16, "BF16"),
    (Kind::Half, "F16"),
    (Kind::Float, "F32"),
    (Kind::Double, "F64"),
    (Kind::ComplexFloat, "C64"),
];

/// No header is longer, says the format.
const MAX_HEADER: u64 = 100_000_000;

/// Returns the name of this kind in safetensors, if it has one.
pub fn dtype(kind: Kind) -> Option<&'static str> {
    DTYPES.iter().find(|(known, _)| *known == kind).map(|(_, dtype)| *dtype)
}

/// Returns the bytes of so many elements, if the dtype is known.
pub fn size(dtype: &str, shape: &[usize]) -> Option<usize> {
    let (kind, _) = DTYPES.iter().find(|(_, known)| *known == dtype)?;
    let mut sizes = shape.iter();
    sizes.try_fold(kind.elt_size_in_bytes(), |bytes, &size| bytes.checked_mul(size))
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorInfo {
    pub dtype: String,
    pub shape: Vec<usize>,
    /// First byte, and the one after the last, from the header's end on.
    pub data_offsets: (u64, u64),
}

/// The header.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Header {
    #[serde(rename = "__metadata__", default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    #[serde(flatten)]
    pub tensors: BTreeMap<String, TensorInfo>,
}

impl Header {
    /// Makes the header of a file with these tensors, given by name, dtype and shape. The largest
    /// elements come first, so that all are aligned.
    ///
    /// # Errors
    /// A dtype is not one of [`DTYPES`], or a shape has too many elements.
    pub fn of<'a>(
        tensors: impl IntoIterator<Item = (String, &'a str, &'a [usize])>,
    ) -> Result<Self, String> {
        let mut tensors: Vec<_> = tensors.into_iter().collect();
        tensors.sort_by_cached_key(|(name, dtype, _)| (Reverse(size(dtype, &[])), name.clone()));
        let mut header = Self::default();
        let mut end = 0;
        for (name, dtype, shape) in tensors {
            let Some(bytes) = size(dtype, shape) else {
                return Err(format!("{name} cannot be of type {dtype} and shape {shape:?}"));
            };
            let data_offsets = (end, end + bytes as u64);
            end = data_offsets.1;
            let info = TensorInfo { dtype: dtype.to_owned(), shape: shape.to_vec(), data_offsets };
            header.tensors.insert(name, info);
        }
        Ok(header)
    }

    /// Returns the tensors in the order of their elements.
    pub fn in_order(&self) -> Vec<(&String, &TensorInfo)> {
        let mut tensors: Vec<_> = self.tensors.iter().collect();
        tensors.sort_by_key(|(_, info)| info.data_offsets);
        tensors
    }

    /// Returns the file's first bytes: all but the elements.
    ///
    /// # Errors
    /// The header is longer than the format allows.
    pub fn to_bytes(&self) -> io::Result<Vec<u8>> {
        let mut header = serde_json::to_vec(self)?;
        header.resize(header.len().next_multiple_of(8), b' ');
        let length = header.len() as u64;
        if length > MAX_HEADER {
            let error = format!("{} tensors are too many for the format", self.tensors.len());
            return Err(io::Error::other(error));
        }
        Ok([&length.to_le_bytes()[..], &header].concat())
    }

    /// Reads the header of a file, and where the elements begin.
    ///
    /// # Errors
    /// The file cannot be read; `InvalidData` or `UnexpectedEof` where it is damaged.
    pub fn read(file: &File) -> io::Result<(Self, u64)> {
        Self::read_by(file.metadata()?.len(), |bytes, start| file.read_exact_at(bytes, start))
    }

    /// Reads the header of a file of so many bytes, of which `read` reads some from a place on, and where
    /// the elements begin.
    ///
    /// # Errors
    /// Those of `read`; `InvalidData` where the file is damaged.
    pub fn read_by(
        bytes: u64,
        read: impl Fn(&mut [u8], u64) -> io::Result<()>,
    ) -> io::Result<(Self, u64)> {
        let mut length = [0; 8];
        read(&mut length, 0)?;
        let length = u64::from_le_bytes(length);
        let rest = bytes - 8;
        if length > rest.min(MAX_HEADER) {
            return Err(invalid(format!("its header cannot have {length} bytes")));
        }
        let mut header = vec![0; length as usize];
        read(&mut header, 8)?;
        let header: Self =
            serde_json::from_slice(&header).map_err(|error| invalid(error.to_string()))?;
        for (name, info) in &header.tensors {
            let (start, end) = info.data_offsets;
            let bytes = size(&info.dtype, &info.shape).map(|bytes| bytes as u64);
            if end > rest - length || end.checked_sub(start) != bytes {
                return Err(invalid(format!("its header is wrong about {name}")));
            }
        }
        Ok((header, 8 + length))
    }
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn written(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    #[test]
    fn a_header_comes_back_and_elements_are_aligned() {
        let shapes: [(&str, &[usize]); 4] =
            [("U8", &[3]), ("F64", &[2, 1]), ("F32", &[]), ("I64", &[0])];
        let named = shapes.iter().enumerate();
        let header =
            Header::of(named.map(|(index, &(dtype, shape))| (index.to_string(), dtype, shape)))
                .unwrap();
        let order: Vec<_> = header
            .in_order()
            .into_iter()
            .map(|(name, info)| (&name[..], info.data_offsets))
            .collect();
        assert_eq!(order, [("1", (0, 16)), ("3", (16, 16)), ("2", (16, 20)), ("0", (20, 23))]);
        let head = header.to_bytes().unwrap();
        assert_eq!(head.len() % 8, 0);
        let file = written(&[&head[..], &[0; 23]].concat());
        assert_eq!(Header::read(&file).unwrap(), (header, head.len() as u64));
    }

    #[test]
    fn damaged_headers_are_errors() {
        let header =
            |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        let one = |shape: &str, offsets: &str| {
            header(&format!(
                r#"{{"w":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#
            ))
        };
        for (bytes, reason) in [
            (vec![1, 2, 3], "failed to fill whole buffer"),
            (vec![255; 8], "its header cannot have 18446744073709551615 bytes"),
            (header("{"), "EOF while parsing an object at line 1 column 1"),
            (one("[1]", "[0,4]"), "its header is wrong about w"),
            (one("[0]", "[4,0]"), "its header is wrong about w"),
            (one("[4611686018427387904,4]", "[0,0]"), "its header is wrong about w"),
        ] {
            assert_eq!(Header::read(&written(&bytes)).unwrap_err().to_string(), reason);
        }
        Header::read(&written(&one("[0]", "[0,0]"))).unwrap();
        assert!(Header::of([("w".to_owned(), "Q4", &[1][..])]).is_err());
    }
}
