//! The sizes of buffers, on the command line and in the output.

use clap::Args;

/// The sizes to measure, and how to print them.
#[derive(Args)]
pub struct Sizes {
    /// Bytes of a buffer, several with commas between them
    #[arg(long, value_delimiter = ',', value_parser = parse_size, allow_hyphen_values = true,
          default_values_t = [4, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20])]
    pub sizes: Vec<usize>,
    /// Print JSON lines
    #[arg(long)]
    pub json: bool,
}

/// Returns a size on the command line.
pub fn parse_size(text: &str) -> Result<usize, String> {
    let bytes = text
        .parse()
        .ok()
        .filter(|bytes: &usize| *bytes != 0 && bytes.is_multiple_of(size_of::<f32>()));
    bytes.ok_or_else(|| "a buffer of f32 takes a multiple of 4 bytes, at least 4".into())
}

/// Returns a size for people to read.
pub fn size_name(bytes: usize) -> String {
    match bytes {
        bytes if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        bytes if bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        bytes => format!("{bytes} B"),
    }
}
