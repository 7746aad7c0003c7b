//! Text as bytes, which are the tokens.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{ensure, Context, Result};
use flate2::read::MultiGzDecoder;
use flow::global::from_local;
use flow::prelude::*;
use flow_examples::fashion::cache_folder;

/// Tokens are bytes.
pub const VOCABULARY: i64 = 256;

/// A text to learn.
pub struct Text(Vec<u8>);

impl Text {
    /// Reads a file, gzipped if its name ends so; without one the Jargon File of Debian's package
    /// jargon-text, as `scripts/setup --data` leaves it.
    pub fn load(path: Option<&Path>) -> Result<Self> {
        let default = || cache_folder().unwrap_or_default().join("jargon.txt.gz");
        let path = path.map_or_else(default, PathBuf::from);
        let name = path.display();
        let file = File::open(&path).with_context(|| {
            format!(
                "cannot read {name}; get a text by `scripts/setup --data`, or name one by --text"
            )
        })?;
        let mut bytes = Vec::new();
        let read = match path.extension().is_some_and(|extension| extension == "gz") {
            true => MultiGzDecoder::new(file).read_to_end(&mut bytes),
            false => { file }.read_to_end(&mut bytes),
        };
        read.with_context(|| format!("cannot read {name}"))?;
        Ok(Self(bytes))
    }

    /// A checksum, to tell texts apart.
    pub fn checksum(&self) -> u32 {
        self.0.iter().fold(1, |sum, &byte| (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193))
    }

    /// The batch of a step: pieces of the text from places that are drawn, each with what follows
    /// each of its bytes. Two tensors, `samples` by `context`, split by samples on the first axis of
    /// the placement; each rank reads its own. Each of `parts` micro-batches, of the ranks' first
    /// rows, their next ones and so on, has the same pieces on any placement. `device` is this rank's.
    pub fn batch(
        &self,
        placement: &Placement,
        (samples, parts, context): (i64, i64, i64),
        (seed, step): (u64, u64),
        device: Device,
    ) -> Result<[Tensor; 2]> {
        let places = self.0.len() as i64 - context;
        ensure!(places > 0, "the text has {} bytes: it needs more than {context}", self.0.len());
        let split = [S(0), B];
        let mut pieces = Vec::new();
        for part in 0..parts as u64 {
            global::set_rng_state(placement, [seed, step * parts as u64 + part])?;
            let sizes = [samples / parts];
            let first = global::randint(0, places, sizes, Kind::Int64, placement, split)?;
            for at in Vec::<i64>::try_from(first.to_local()?)? {
                pieces.extend_from_slice(&self.0[at as usize..=(at + context) as usize]);
            }
        }
        let pieces = Tensor::from_slice(&pieces).view([-1, context + 1]).to_kind(Kind::Int64);
        let pieces = pieces.to_device(device);
        let part = |start| {
            let part = pieces.narrow(1, start, context);
            from_local(&part, [samples, context], placement, split)
        };
        Ok([part(0)?, part(1)?])
    }
}
