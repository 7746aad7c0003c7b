//! Text as bytes, which are the tokens.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{ensure, Context, Result};
use flate2::read::MultiGzDecoder;
use flow::global::from_local;
use flow::prelude::*;
use flow_examples::fashion::cache_folder;

use super::options::Options;

/// By samples, over the data parallel ranks.
const SPLIT: [Sbp; 2] = [S(0), B];

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

    /// # Errors
    /// It is too short for a sample.
    pub fn check(&self, options: &Options) -> Result<()> {
        let (bytes, context) = (self.0.len(), options.context);
        ensure!(
            bytes as i64 > context,
            "the text has {bytes} bytes to train on: it needs more than --context {context}"
        );
        Ok(())
    }

    /// Takes the last of so many parts away.
    pub fn split_off_part(&mut self, parts: usize) -> Self {
        Self(self.0.split_off(self.0.len() - self.0.len() / parts))
    }

    /// The batch of a step: pieces of the text from places that are drawn, each with what follows
    /// each of its bytes. Two tensors, samples by context, split by samples on the first axis of the
    /// placement; each rank reads its own. Each micro-batch, of the ranks' first rows, their next ones
    /// and so on, has the same pieces on any placement. `device` is this rank's.
    pub fn batch(
        &self,
        placement: &Placement,
        options: &Options,
        step: u64,
        device: Device,
    ) -> Result<[Tensor; 2]> {
        let &Options { batch_size, micro_batches, context, .. } = options;
        let seed = options.seed.wrapping_add(1);
        let count = self.0.len() as i64 - context;
        let mut places = Vec::new();
        for part in 0..micro_batches as u64 {
            global::set_rng_state(placement, [seed, step * micro_batches as u64 + part])?;
            let sizes = [batch_size / micro_batches];
            let own = global::randint(0, count, sizes, Kind::Int64, placement, SPLIT)?;
            places.extend(Vec::<i64>::try_from(own.to_local()?)?);
        }
        log::debug!("step {step}: samples from {places:?}");
        self.at(&places, placement, options, device)
    }

    /// How many batches of pieces, one after the other, the text has.
    ///
    /// # Errors
    /// When it has none.
    pub fn batches(&self, options: &Options) -> Result<i64> {
        let (context, bytes) = (options.context, self.0.len() as i64);
        let batches = (bytes - 1) / context / options.batch_size;
        ensure!(
            batches > 0,
            "--validate-every holds out the last {bytes} bytes of the text, and a batch is {} of \
             {context} bytes: give a longer text",
            options.batch_size
        );
        Ok(batches)
    }

    /// The batch with this number, as [`batch`](Self::batch) has it.
    pub fn pieces(
        &self,
        placement: &Placement,
        options: &Options,
        number: i64,
        device: Device,
    ) -> Result<[Tensor; 2]> {
        let bytes = options.batch_size * options.context;
        let (start, end) = (number * bytes, (number + 1) * bytes);
        let (kind, step) = (Kind::Int64, options.context);
        let places = global::arange_start_step(start, end, step, kind, placement, SPLIT)?;
        self.at(&Vec::<i64>::try_from(places.to_local()?)?, placement, options, device)
    }

    /// The batch of the pieces at this rank's places.
    fn at(
        &self,
        places: &[i64],
        placement: &Placement,
        &Options { batch_size, context, .. }: &Options,
        device: Device,
    ) -> Result<[Tensor; 2]> {
        let mut pieces = Vec::new();
        for &at in places {
            pieces.extend_from_slice(&self.0[at as usize..=(at + context) as usize]);
        }
        let pieces = Tensor::from_slice(&pieces).view([-1, context + 1]).to_kind(Kind::Int64);
        let pieces = pieces.to_device(device);
        let part = |start| {
            let part = pieces.narrow(1, start, context);
            from_local(&part, [batch_size, context], placement, SPLIT)
        };
        Ok([part(0)?, part(1)?])
    }
}
