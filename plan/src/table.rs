//! Predictions as tables.

use flow_plan::{Comparison, Limit, Part, Plans, Prediction, ScheduleKind};

/// The layouts, a line for each.
pub fn plans(plans: &Plans) -> String {
    let mut rows = vec![[
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
    .map(String::from)];
    rows.extend(plans.best.iter().map(row));
    let count = format!("{} layouts, {} of them fit in memory", plans.tried, plans.fit);
    let is_too_fast =
        |plan: &Prediction| plan.layout.zero == 3 && plan.data_traffic.inter_node > 0.0;
    let warning = match plans.best.iter().any(is_too_fast) {
        true => "ZeRO 3 on several nodes is predicted too fast: docs/planner.md\n",
        false => "",
    };
    format!("{}{count}\n{warning}", aligned(&rows))
}

fn row(plan: &Prediction) -> [String; 16] {
    let layout = &plan.layout;
    let schedule = match (layout.pipeline, layout.schedule) {
        (1, _) => "-".into(),
        (_, ScheduleKind::Interleaved) => format!("interleaved x {}", layout.chunks),
        (_, schedule) => schedule.name().into(),
    };
    [
        seconds(plan.time.step),
        layout.data.to_string(),
        layout.tensor.to_string(),
        layout.pipeline.to_string(),
        layout.micro_batch.to_string(),
        schedule,
        layout.zero.to_string(),
        layout.recompute.name().into(),
        if layout.sequence_parallel { "yes" } else { "-" }.into(),
        operations(plan.flops),
        bytes(plan.memory.total),
        bytes(plan.tensor_traffic.bytes()),
        bytes(plan.pipeline_traffic.bytes()),
        bytes(plan.data_traffic.bytes()),
        percent(plan.idle),
        limits(plan),
    ]
}

/// Measured runs beside what is predicted.
pub fn comparisons(source: &str, comparisons: &[Comparison]) -> String {
    let memory_errors: Vec<f64> = comparisons.iter().filter_map(|run| run.memory_error).collect();
    let has_memory = !memory_errors.is_empty();
    let [of_memory, of_error] = if has_memory { ["measured", "error"] } else { [""; 2] };
    let mut rows = vec![[
        "run",
        "dp x tp x pp",
        "measured",
        "predicted",
        "time",
        "memory",
        of_memory,
        of_error,
    ]
    .map(String::from)];
    rows.extend(comparisons.iter().map(comparison));
    let (fitted, checks): (Vec<_>, Vec<_>) = comparisons.iter().partition(|run| run.fitted);
    let without = match fitted.len() {
        0 => String::new(),
        count => format!(", without the {count} fitted"),
    };
    let of_time = mean_and_worst(checks.iter().map(|run| run.error));
    let of_memory = match has_memory {
        true => format!("memory: {}\n", mean_and_worst(memory_errors.into_iter())),
        false => String::new(),
    };
    format!("measured: {source}\n{}{of_time}{without}\n{of_memory}", aligned(&rows))
}

fn comparison(run: &Comparison) -> [String; 8] {
    let layout = &run.prediction.layout;
    let teraflops = |teraflops: f64| operations(1e12 * teraflops) + "flop/s";
    let shown = |number| match run.measured.seconds {
        Some(_) => seconds(number),
        None => teraflops(number),
    };
    let error = |error: f64| format!("{:+.1}%", 100.0 * error);
    [
        run.name.clone(),
        format!("{} x {} x {}", layout.data, layout.tensor, layout.pipeline),
        run.measured.seconds.or(run.measured.teraflops).map(shown).unwrap_or_default(),
        shown(run.predicted),
        error(run.error) + if run.fitted { " fitted" } else { "" },
        bytes(run.prediction.memory.total),
        run.measured.memory.map(bytes).unwrap_or_default(),
        run.memory_error.map(error).unwrap_or_default(),
    ]
}

fn mean_and_worst(errors: impl ExactSizeIterator<Item = f64>) -> String {
    let count = errors.len().max(1) as f64;
    let add = |(sum, worst): (f64, f64), error: f64| (sum + error.abs(), worst.max(error.abs()));
    let (sum, worst) = errors.fold((0.0, 0.0), add);
    format!("mean error {}, worst {}", percent(sum / count), percent(worst))
}

/// Columns as wide as their widest cell.
pub fn aligned<const N: usize>(rows: &[[String; N]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// The two largest parts of a step.
fn limits(plan: &Prediction) -> String {
    let shown = |part: &Part| {
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
        (part.part > 0.0).then(|| format!("{name} {}", percent(part.part)))
    };
    plan.limits.iter().filter_map(shown).collect::<Vec<_>>().join(", ")
}

/// As `1.23 GB`.
pub fn bytes(bytes: f64) -> String {
    let units = [(1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    scaled(bytes, &units, "B")
}

/// As `12.3 ms`.
pub fn seconds(seconds: f64) -> String {
    scaled(seconds, &[(1.0, "s"), (1e-3, "ms"), (1e-6, "us")], "s")
}

/// As `153 T`, of operations a second.
pub fn operations(operations: f64) -> String {
    scaled(operations, &[(1e12, "T"), (1e9, "G"), (1e6, "M")], "")
}

/// As `12.3%`.
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

/// Three digits.
fn significant(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}
