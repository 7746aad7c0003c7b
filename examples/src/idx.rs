//! Reader of IDX files, the format of MNIST and Fashion-MNIST, plain or gzipped.
//!
//! The format, from <http://yann.lecun.com/exdb/mnist/>: two zero bytes, a type byte (8 for
//! unsigned bytes) and the number of dimensions. Each dimension follows as a big-endian 32-bit
//! number, then the data in row-major order.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use flate2::bufread::MultiGzDecoder;

/// The type byte of unsigned bytes.
const UNSIGNED_BYTE: u8 = 8;
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// An array of bytes.
#[derive(Debug, PartialEq, Eq)]
pub struct Idx {
    /// Length of each dimension.
    pub shape: Vec<usize>,
    /// The elements in row-major order, as many as the product of `shape`.
    pub data: Vec<u8>,
}

/// Reads the IDX file of unsigned bytes at `path`, whose array must have `dimensions` dimensions. A
/// gzipped file is recognized by its first bytes.
///
/// # Errors
/// When the file cannot be read, is not such an IDX file, or has fewer or more bytes than its
/// header says.
pub fn read(path: &Path, dimensions: usize) -> Result<Idx> {
    let name = path.display();
    let file = File::open(path).with_context(|| format!("cannot open {name}"))?;
    let mut file = BufReader::new(file);
    let gzipped =
        file.fill_buf().with_context(|| format!("cannot read {name}"))?.starts_with(&GZIP_MAGIC);
    let mut content: Box<dyn Read> =
        if gzipped { Box::new(MultiGzDecoder::new(file)) } else { Box::new(file) };
    let header = 4 + 4 * dimensions;
    let bytes = read_up_to(header as u64, &mut content, path)?;
    let (magic, lengths) = bytes.split_at(bytes.len().min(4));
    let expected = [0, 0, UNSIGNED_BYTE, dimensions as u8];
    ensure!(
        magic == expected,
        "{name} is no IDX file of bytes in {dimensions} dimensions: it starts with {magic:02x?}, \
         not {expected:02x?}"
    );
    ensure!(
        bytes.len() == header,
        "{name} is truncated: its header takes {header} bytes, found {}",
        bytes.len()
    );
    let lengths = lengths
        .chunks_exact(4)
        .map(|length| u32::from_be_bytes([length[0], length[1], length[2], length[3]]));
    let shape: Vec<usize> = lengths.map(|length| length as usize).collect();

    let size = shape.iter().try_fold(1usize, |size, &length| size.checked_mul(length));
    let size = size.with_context(|| format!("{name}: an array of shape {shape:?} is too large"))?;
    // One byte more than expected, to see whether there is one, and to have gzip's checksum
    // verified at the end.
    let data = read_up_to((size as u64).saturating_add(1), &mut content, path)?;
    let of_shape = format!("an array of shape {shape:?} takes {size} bytes after the header");
    ensure!(data.len() >= size, "{name} is truncated: {of_shape}, found {}", data.len());
    ensure!(data.len() == size, "{name} is too long: {of_shape}, found more");
    Ok(Idx { shape, data })
}

fn read_up_to(limit: u64, content: &mut impl Read, path: &Path) -> Result<Vec<u8>> {
    let name = path.display();
    let mut bytes = Vec::new();
    match content.take(limit).read_to_end(&mut bytes) {
        Ok(_) => Ok(bytes),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => bail!(
            "{name} is truncated: its gzip stream ends early, after {} bytes of content",
            bytes.len()
        ),
        Err(error) => Err(error).with_context(|| format!("cannot read {name}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::{Compression, write::GzEncoder};
    use std::io::Write;

    /// Two images of 2 x 3.
    fn images() -> Vec<u8> {
        let header = [0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 3];
        header.into_iter().chain(1..=12).collect()
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn read_bytes(bytes: &[u8]) -> Result<Idx> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        read(file.path(), 3)
    }

    /// The error for `bytes`: one line that names the file.
    fn error(bytes: &[u8]) -> String {
        let error = format!("{:#}", read_bytes(bytes).unwrap_err());
        assert!(error.contains("/.tmp") && !error.contains('\n'), "{error}");
        error
    }

    #[test]
    fn reads_plain_and_gzipped_files() {
        let expected = Idx { shape: vec![2, 2, 3], data: (1..=12).collect() };
        assert_eq!(read_bytes(&images()).unwrap(), expected);
        assert_eq!(read_bytes(&gzip(&images())).unwrap(), expected);
    }

    #[test]
    fn every_truncation_is_an_error() {
        let (plain, gzipped) = (images(), gzip(&images()));
        for bytes in [&plain, &gzipped] {
            (0..bytes.len()).for_each(|len| drop(error(&bytes[..len])));
        }
        let found = error(&plain[..20]);
        assert!(found.ends_with(
            "is truncated: an array of shape [2, 2, 3] takes 12 bytes after the header, found 4"
        ));
        assert!(error(&plain[..10]).ends_with("is truncated: its header takes 16 bytes, found 10"));
        assert!(
            error(&gzipped[..gzipped.len() - 1])
                .contains("is truncated: its gzip stream ends early")
        );
    }

    #[test]
    fn more_data_than_the_header_says_is_an_error() {
        let long = [images(), vec![0]].concat();
        for bytes in [gzip(&long), long] {
            let error = error(&bytes);
            assert!(error.ends_with(
                "is too long: an array of shape [2, 2, 3] takes 12 bytes after the header, found \
                 more"
            ));
        }
    }

    #[test]
    fn another_type_or_number_of_dimensions_is_an_error() {
        for (place, value) in [(0, 1), (2, 0x0d), (3, 1)] {
            let mut bytes = images();
            bytes[place] = value;
            assert!(
                error(&bytes).contains("is no IDX file of bytes in 3 dimensions: it starts with [")
            );
        }
        assert!(
            error(b"<!DOCTYPE html>")
                .ends_with("it starts with [3c, 21, 44, 4f], not [00, 00, 08, 03]")
        );
        assert!(error(b"").ends_with("it starts with [], not [00, 00, 08, 03]"));
    }

    #[test]
    fn a_lying_header_does_not_take_memory() {
        let huge = [&[0, 0, 8, 3][..], &[0xff; 12]].concat();
        assert!(
            error(&huge)
                .ends_with("an array of shape [4294967295, 4294967295, 4294967295] is too large")
        );
        let large = [&[0, 0, 8, 3][..], &[0xff; 4], &[0, 0, 0, 1], &[0, 0, 0, 1]].concat();
        assert!(error(&large).ends_with("takes 4294967295 bytes after the header, found 0"));
    }

    #[test]
    fn a_corrupt_gzip_file_is_an_error() {
        let mut bytes = gzip(&images());
        let checksum = bytes.len() - 8;
        bytes[checksum] ^= 1;
        assert!(error(&bytes).starts_with("cannot read /"));
    }
}
