//! Text that a trained model makes.

use std::io::{stdout, Write};

use anyhow::{ensure, Result};
use flow::prelude::*;

use crate::model::Stage;
use crate::options::Options;

/// Prints the prompt, and byte after byte what the model draws to follow. All ranks draw the same.
pub fn print(
    (model, placement): (&Stage, &Placement),
    prompt: &str,
    options: &Options,
    group: &ProcessGroup,
) -> Result<()> {
    ensure!(!prompt.is_empty(), "--sample needs some text to go on with");
    let context = options.context as usize;
    let _no_grad = tch::no_grad_guard();
    tch::manual_seed(options.seed as i64);
    let mut bytes = prompt.as_bytes().to_vec();
    let show = |bytes: &[u8]| -> Result<()> {
        if group.rank() == 0 {
            stdout().write_all(bytes)?;
            stdout().flush()?;
        }
        Ok(())
    };
    show(&bytes)?;
    for _ in 0..options.sample_bytes {
        let seen = &bytes[bytes.len().saturating_sub(context)..];
        let last = seen.len() as i64 - 1;
        // What follows the last byte changes nothing before it.
        let mut tokens: Vec<i64> = seen.iter().map(|&byte| i64::from(byte)).collect();
        tokens.resize(context, 0);
        let tokens = Tensor::from_slice(&tokens).view([1, -1]).to_device(group.device());
        let tokens = global::distribute_tensor(&tokens, placement, [B, B])?;
        let logits = model.logits(&tokens, false)?.full()?.to(Device::Cpu);
        let logits = logits.select(0, 0).select(0, last).to_kind(Kind::Double);
        let likely = (logits / options.temperature).softmax(-1, Kind::Double);
        let next = likely.multinomial(1, false).int64_value(&[0]) as u8;
        bytes.push(next);
        show(&[next])?;
    }
    show(b"\n")
}
