//! `explain` says what operations on global tensors move between ranks, why, and which pins would
//! save bytes.

use std::collections::BTreeMap;
use std::fmt;

use crate::placement::Placement;
use crate::planner::{Cost, Pin, Prices, cost, pins};
use crate::sbp::{NdSbp, Sbp, text};
use crate::trace::{CallKind, Phase, Trace, TracedCall};

/// A trace as a table. Its text has a line for each kind of call, then the bytes by kind of boxing,
/// then the pins.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Calls, those that are alike together, in the order of the trace.
    pub rows: Vec<Row>,
    /// The number of boxings of each kind, and the bytes that they took, by name.
    pub boxings: BTreeMap<String, (usize, f64)>,
    /// The cost of all. Bytes are those that a rank receives from others, on average.
    pub cost: Cost,
    /// Pins that make it cheaper with weights as they are, found by the planner. Those that save
    /// most bytes come first.
    pub pins: Vec<Pin>,
}

/// One row of the table: equal calls, with their count.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The number of calls.
    pub count: usize,
    /// The name with the overload, as `sum.dim_IntList`.
    pub name: String,
    /// Whether autograd runs them.
    pub phase: Phase,
    /// Each tensor that they get.
    pub inputs: Vec<RowInput>,
    /// The SBPs of the results.
    pub outputs: Vec<NdSbp>,
    /// Received by a rank for all of them.
    pub bytes: f64,
    /// The reason for which tensors are boxed.
    pub why: Why,
}

/// A tensor that a call gets.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RowInput {
    /// Its logical shape.
    pub shape: Vec<usize>,
    /// The SBP that it had.
    pub sbp: String,
    /// The SBP that it was boxed to.
    pub boxed: String,
}

/// The reason for which tensors are boxed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Why {
    /// The operation cannot run with the SBPs that its inputs have; to box them in this way takes
    /// the fewest bytes.
    Rule,
    /// The operation has no rule, so that its inputs are gathered.
    NoRule,
    /// The program asks for it.
    Asked,
    /// A gradient gets the SBP of its leaf.
    Leaf,
}

impl Table {
    /// Explains a trace. The search for pins takes a second or so for a step of 12 layers.
    pub fn of(trace: &Trace) -> Self {
        let mut boxings = BTreeMap::<String, (usize, f64)>::new();
        for call in &trace.calls {
            for boxing in trace.boxings(call) {
                let of = &trace.values[boxing.value].placement;
                let is_same = trace.placement(call) == Some(of);
                let total = boxings.entry(kind(of, boxing.from, boxing.to, is_same)).or_default();
                *total = (total.0 + 1, total.1 + boxing.bytes);
            }
        }
        let pins = pins(trace, &Prices::default());
        Self { rows: rows(trace), boxings, cost: cost(trace), pins }
    }
}

impl Row {
    fn is_like(&self, other: &Self) -> bool {
        self.phase == other.phase
            && self.why == other.why
            && self.name == other.name
            && self.inputs == other.inputs
            && self.outputs == other.outputs
    }
}

/// Returns the calls, those that are alike together.
pub(crate) fn rows(trace: &Trace) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for call in &trace.calls {
        let row = row(trace, call);
        match rows.iter_mut().find(|other| other.is_like(&row)) {
            Some(other) => {
                other.count += 1;
                other.bytes += row.bytes;
            }
            None => rows.push(row),
        }
    }
    rows
}

fn row(trace: &Trace, call: &TracedCall) -> Row {
    let inputs = call.inputs.iter().zip(&call.boxed).filter_map(|(id, boxed)| {
        let value = &trace.values[(*id)?];
        let sbp = text(&value.sbp);
        let boxed = text(boxed);
        Some(RowInput { shape: value.tensor.shape.clone(), sbp, boxed })
    });
    let outputs = call.outputs.iter().flatten().map(|&id| trace.values[id].sbp.clone());
    let bytes = trace.boxings(call).map(|boxing| boxing.bytes).sum();
    let why = match call.kind {
        CallKind::ToGlobal => Why::Asked,
        CallKind::Gradient => Why::Leaf,
        CallKind::Operation if call.has_rule => Why::Rule,
        CallKind::Operation => Why::NoRule,
    };
    let in_place = if call.in_place { "_" } else { "" };
    let overload = if call.overload.is_empty() { "" } else { "." };
    let name = format!("{}{in_place}{overload}{}", call.name, call.overload);
    let inputs = inputs.collect();
    let outputs = outputs.collect();
    Row { count: 1, name, phase: call.phase, inputs, outputs, bytes, why }
}

/// Returns the names of what is done on each axis.
fn kind(placement: &Placement, from: &[Sbp], to: &[Sbp], is_same: bool) -> String {
    if !is_same {
        return "to another placement".to_string();
    }
    let mut names = Vec::new();
    for ((from, to), &ranks) in from.iter().zip(to).zip(placement.shape()) {
        if ranks > 1 && from != to {
            names.push(kind_on_axis(*from, *to));
        }
    }
    names.join(" + ")
}

fn kind_on_axis(from: Sbp, to: Sbp) -> &'static str {
    match (from, to) {
        (_, Sbp::Partial(_)) => "to partial",
        (Sbp::Broadcast, _) => "slice",
        (Sbp::Partial(_), Sbp::Broadcast) => "all-reduce",
        (Sbp::Partial(_), Sbp::Split(_)) => "reduce-scatter",
        (Sbp::Split(_), Sbp::Broadcast) => "all-gather",
        (Sbp::Split(_), Sbp::Split(_)) => "all-to-all",
    }
}

/// Formats bytes, as `1.5 MiB`.
fn size(bytes: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = (0..4).find(|&unit| bytes.abs() < 1024f64.powi(unit + 1)).unwrap_or(4);
    let digits = usize::from(unit > 0);
    format!("{:.digits$} {}", bytes / 1024f64.powi(unit), units[unit as usize])
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for row in &self.rows {
            writeln!(f, "{row}")?;
        }
        writeln!(f, "each rank receives {}:", size(self.cost.bytes))?;
        for (kind, (count, bytes)) in &self.boxings {
            writeln!(f, "{:>6}x {:>10}  {kind}", count, size(*bytes))?;
        }
        if !self.pins.is_empty() {
            writeln!(f, "it would receive less, with:")?;
        }
        for pin in &self.pins {
            writeln!(f, "        {:>10}  {pin}", size(-pin.saved))?;
        }
        Ok(())
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phase = if self.phase == Phase::Backward { "backward " } else { "" };
        let bytes = if self.bytes > 0.0 { size(self.bytes) } else { String::new() };
        write!(f, "{:>6}x {bytes:>10}  {phase}{}(", self.count, self.name)?;
        for (index, RowInput { shape, sbp, boxed }) in self.inputs.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            if sbp == boxed {
                write!(f, "{comma}{shape:?} {sbp}")?
            } else {
                write!(f, "{comma}{shape:?} {sbp}>{boxed}")?
            }
        }
        let outputs: Vec<_> = self.outputs.iter().map(|sbp| text(sbp)).collect();
        let without = if self.why == Why::NoRule { ", has no rule" } else { "" };
        write!(f, ") -> {}{without}", outputs.join(", "))
    }
}
