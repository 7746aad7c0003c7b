//! Predictions as tables.

use flow_plan::{Comparison, Limit, Measured, Part, Prediction, ScheduleKind, SearchResult};

/// Formats a line for each layout.
pub fn layouts(found: &SearchResult) -> String {
    let mut rows = vec![
        [
            "step",
            "dp",
            "tp",
            "pp",
            "micro-batch",
            "schedule",
            "ZeRO",
            "recompute",
            "SP",
            "flop/s",
            "memory",
            "tp sends",
            "pp sends",
            "dp sends",
            "idle",
            "limited by",
        ]
        .map(String::from),
    ];
    rows.extend(found.best.iter().map(row));
    let mut text = aligned(&rows);
    text += &format!("{} layouts, {} of them fit in memory\n", found.tried, found.fit);
    text
}

fn row(prediction: &Prediction) -> [String; 16] {
    let layout = &prediction.layout;
    let schedule = match (layout.pipeline, layout.schedule) {
        (1, _) => "-".into(),
        (_, ScheduleKind::Interleaved) => format!("interleaved x {}", layout.chunks),
        (_, schedule) => schedule.name().into(),
    };
    [
        seconds(prediction.time.step),
        layout.data.to_string(),
        layout.tensor.to_string(),
        layout.pipeline.to_string(),
        layout.micro_batch.to_string(),
        schedule,
        if layout.shared_weights { "Fsdp".into() } else { layout.zero.to_string() },
        layout.recompute.name().into(),
        if layout.sequence_parallel { "yes" } else { "-" }.into(),
        operations(prediction.flops),
        bytes(prediction.memory.total),
        bytes(prediction.tensor_traffic.bytes()),
        bytes(prediction.pipeline_traffic.bytes()),
        bytes(prediction.data_traffic.bytes()),
        percent(prediction.idle),
        limits(prediction),
    ]
}

/// Formats measured runs beside their predictions.
pub fn comparisons(source: &str, comparisons: &[Comparison]) -> String {
    let memory_errors: Vec<f64> = comparisons.iter().filter_map(|run| run.memory_error).collect();
    let has_memory = !memory_errors.is_empty();
    let [of_memory, of_error] = if has_memory { ["measured", "error"] } else { [""; 2] };
    let mut rows = vec![
        ["run", "dp x tp x pp", "measured", "predicted", "time", "memory", of_memory, of_error]
            .map(String::from),
    ];
    rows.extend(comparisons.iter().map(comparison));
    let checks = comparisons.iter().filter(|run| !run.fitted);
    let errors: Vec<f64> = checks.map(|run| run.error).collect();
    let mut text = format!("measured: {source}\n{}{}", aligned(&rows), mean_and_worst(&errors));
    let fitted = comparisons.len() - errors.len();
    if fitted > 0 {
        text += &format!(", without the {fitted} fitted");
    }
    text += "\n";
    if has_memory {
        text += &format!("memory: {}\n", mean_and_worst(&memory_errors));
    }
    text
}

fn comparison(run: &Comparison) -> [String; 8] {
    let layout = &run.prediction.layout;
    let (measured, predicted) = match run.measured {
        Measured { seconds: Some(measured), .. } => (seconds(measured), seconds(run.predicted)),
        Measured { teraflops, .. } => {
            (teraflops.map(speed).unwrap_or_default(), speed(run.predicted))
        }
    };
    [
        run.name.clone(),
        format!("{} x {} x {}", layout.data, layout.tensor, layout.pipeline),
        measured,
        predicted,
        signed_percent(run.error) + if run.fitted { " fitted" } else { "" },
        bytes(run.prediction.memory.total),
        run.measured.memory.map(bytes).unwrap_or_default(),
        run.memory_error.map(signed_percent).unwrap_or_default(),
    ]
}

fn speed(teraflops: f64) -> String {
    operations(1e12 * teraflops) + "flop/s"
}

fn signed_percent(error: f64) -> String {
    format!("{:+.1}%", 100.0 * error)
}

fn mean_and_worst(errors: &[f64]) -> String {
    let sum: f64 = errors.iter().map(|error| error.abs()).sum();
    let worst = errors.iter().map(|error| error.abs()).fold(0.0, f64::max);
    let mean = sum / errors.len().max(1) as f64;
    format!("mean error {}, worst {}", percent(mean), percent(worst))
}

/// Formats rows in columns that are as wide as their widest cell.
pub fn aligned<const N: usize>(rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.len().max(*width);
        }
    }
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        text += cells.join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// Names the two largest parts of a step.
fn limits(prediction: &Prediction) -> String {
    let parts = prediction.limits.iter().filter(|part| part.part > 0.0);
    parts.map(limit).collect::<Vec<_>>().join(", ")
}

fn limit(part: &Part) -> String {
    let name = match part.limit {
        Limit::Compute => "compute",
        Limit::Memory => "memory",
        Limit::TensorLink => "tp link",
        Limit::PipelineLink => "pp link",
        Limit::DataLink => "dp link",
        Limit::Imbalance => "imbalance",
        Limit::Bubble => "bubble",
        Limit::Cores => "cores",
    };
    format!("{name} {}", percent(part.part))
}

/// Formats bytes, as `1.23 GB`.
pub fn bytes(bytes: f64) -> String {
    let units = [(1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    scaled(bytes, &units, "B")
}

/// Formats seconds, as `12.3 ms`.
pub fn seconds(seconds: f64) -> String {
    scaled(seconds, &[(1.0, "s"), (1e-3, "ms"), (1e-6, "us")], "s")
}

/// Formats operations a second, as `153 T`.
pub fn operations(operations: f64) -> String {
    scaled(operations, &[(1e12, "T"), (1e9, "G"), (1e6, "M")], "")
}

/// Formats a part of 1, as `12.3%`.
pub fn percent(part: f64) -> String {
    format!("{:.1}%", 100.0 * part)
}

fn scaled(value: f64, units: &[(f64, &str)], none: &str) -> String {
    let unit = units.iter().find(|(size, _)| value >= *size).or(units.last());
    match unit {
        Some(&(size, unit)) if value > 0.0 => format!("{} {unit}", significant(value / size)),
        _ => format!("0 {none}"),
    }
}

/// Formats three digits.
fn significant(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}
