//! Text as bytes, which are the tokens.

use std::path::Path;

use anyhow::{Result, ensure};
use flow::global::from_local;
use flow::prelude::*;
use flow_examples::text;

use super::options::Options;

/// Batches are split by samples, over the data parallel ranks.
const SPLIT: [Sbp; 2] = [S(0), B];

/// A text to learn.
pub struct Text(Vec<u8>);

impl Text {
    /// Reads a file, or the text that `scripts/setup --data` leaves.
    pub fn load(path: Option<&Path>) -> Result<Self> {
        Ok(Self(text::read(path)?))
    }

    /// Returns a checksum, to tell texts apart.
    pub fn checksum(&self) -> u32 {
        self.0.iter().fold(1, |sum, &byte| (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193))
    }

    /// Checks that the text is long enough for a sample.
    pub fn check(&self, options: &Options) -> Result<()> {
        let bytes = self.0.len() as i64;
        let context = options.context;
        ensure!(
            bytes > context,
            "the text has {bytes} bytes to train on: it needs more than --context {context}"
        );
        Ok(())
    }

    /// Takes the last of so many parts away.
    pub fn split_off_part(&mut self, parts: usize) -> Self {
        Self(self.0.split_off(self.0.len() - self.0.len() / parts))
    }

    /// Draws the batch of a step: pieces of the text, and the same pieces one byte further on. These
    /// are two tensors, samples by context, split by samples on the first axis of the placement; each
    /// rank reads its own. Each micro-batch, of the ranks' first rows, their next ones and so on, has
    /// the same pieces on any placement. `device` is this rank's.
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

    /// Returns how many batches of pieces, one after the other, the text has.
    ///
    /// # Errors
    /// When it has none.
    pub fn batches(&self, options: &Options) -> Result<i64> {
        let context = options.context;
        let bytes = self.0.len() as i64;
        let batches = (bytes - 1) / context / options.batch_size;
        ensure!(
            batches > 0,
            "--validate-every holds out the last {bytes} bytes of the text, and a batch is {} of \
             {context} bytes: give a longer text",
            options.batch_size
        );
        Ok(batches)
    }

    /// Returns the batch with this number, as [`batch`](Self::batch) has it.
    pub fn pieces(
        &self,
        placement: &Placement,
        options: &Options,
        number: i64,
        device: Device,
    ) -> Result<[Tensor; 2]> {
        let bytes = options.batch_size * options.context;
        let places = global::arange_start_step(
            number * bytes,
            (number + 1) * bytes,
            options.context,
            Kind::Int64,
            placement,
            SPLIT,
        )?;
        self.at(&Vec::<i64>::try_from(places.to_local()?)?, placement, options, device)
    }

    /// Returns the batch of the pieces at this rank's places.
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
        let shape = [batch_size, context];
        Ok([
            from_local(&pieces.narrow(1, 0, context), shape, placement, SPLIT)?,
            from_local(&pieces.narrow(1, 1, context), shape, placement, SPLIT)?,
        ])
    }
}
