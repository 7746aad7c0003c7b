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
            format!("cannot read {name}; get a text by `scripts/setup --data`, or name one by --text")
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

    /// Pieces of the text from places that are drawn, each with what follows each of its bytes: two
    /// tensors of `samples` by `context`, split by samples on the first axis of the placement. Each
    /// rank reads its own. The same `number` is the same pieces, on any placement.
    pub fn batch(
        &self,
        placement: &Placement,
        (samples, context): (i64, i64),
        (seed, number): (u64, u64),
    ) -> Result<[Tensor; 2]> {
        let places = self.0.len().saturating_sub(context as usize);
        ensure!(places > 0, "the text has {} bytes: it needs more than {context}", self.0.len());
        global::set_rng_state(placement, [seed, number])?;
        let split = [S(0), B];
        let first = global::randint(0, places as i64, [samples], Kind::Int64, placement, split)?;
        let own = Vec::<i64>::try_from(first.to_local()?)?;
        let pieces = own.iter().map(|&at| &self.0[at as usize..at as usize + context as usize + 1]);
        let pieces = Tensor::from_slice(&pieces.collect::<Vec<_>>().concat());
        let pieces = pieces.view([-1, context + 1]).to_kind(Kind::Int64).to(first.device());
        let part = |start| {
            let part = pieces.narrow(1, start, context);
            from_local(&part, [samples, context], placement, split)
        };
        Ok([part(0)?, part(1)?])
    }
}
