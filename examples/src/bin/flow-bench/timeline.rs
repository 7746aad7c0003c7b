//! A backward and its reductions as a trace that browsers show (chrome://tracing, ui.perfetto.dev).

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use flow_ddp::Stats;
use serde_json::{Value, json};

/// Writes the last backward: a row for itself and one for each bucket, from its last gradient to
/// the end of its reduction.
pub fn write(file: &Path, stats: &Stats) -> Result<()> {
    let buckets = stats.buckets.iter().enumerate().map(|(number, bucket)| {
        let details = json!({
            "bytes": bucket.bytes, "parameters": bucket.parameters.len(),
            "behind_us": us(bucket.times.behind_backward),
        });
        span(
            number + 1,
            &format!("bucket {number}"),
            bucket.times.ready_at,
            bucket.times.ready_to_done,
            details,
        )
    });
    let backward = span(0, "backward", Duration::ZERO, stats.backward, json!({}));
    let events: Vec<Value> = std::iter::once(backward).chain(buckets).collect();
    fs::write(file, json!({"traceEvents": events}).to_string())
        .with_context(|| format!("cannot write {}", file.display()))
}

fn span(row: usize, name: &str, start: Duration, duration: Duration, details: Value) -> Value {
    json!({
        "name": name, "ph": "X", "pid": 0, "tid": row,
        "ts": us(start), "dur": us(duration), "args": details,
    })
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
