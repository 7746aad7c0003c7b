//! Carries out plans of boxing on tensors.
//!
//! Ranks of one machine read each other's memory (`ProcessGroup::read_peers`): each element is
//! copied, or reduced, once, from where it is to where it belongs. Else, on GPUs and between
//! machines, it goes by collectives, which need elements side by side (`packed`).

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

use flow_comm::{Buffer, Peers, ReduceOp, digest};
use tch::{Device, Kind, Tensor};

use super::memory::{self, Part, in_memory, runs, view};
use super::packed;
use super::phases::{Exchange, Reduce, Shares};
use super::plan::{BoxingPlan, TensorLayout};
use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::groups::Groups;
use crate::kinds::real;
use crate::placement::Placement;
use crate::region::{Region, regions};
use crate::runtime::Runtime;
use crate::sbp::{B, NdSbp, Sbp, neutral, text};
use crate::sequence::AgreedOperation;

/// Partial values of at most so many bytes are read by all ranks: one step is faster than two.
pub const SMALL: usize = 16 << 10;

/// Boxing of tensors of one shape between two layouts: the plan, and what this rank does.
pub struct Boxing {
    rank: usize,
    shape: Vec<usize>,
    /// The old layout and the new one.
    layouts: [(Placement, NdSbp); 2],
    /// The boxing of complex numbers' parts: see [`Boxing::of_parts`].
    of_parts: OnceLock<Box<Boxing>>,
    plan: BoxingPlan,
    operation: Arc<AgreedOperation>,
    /// Steps that one plan cannot do together with the rest, and that come first ([`between`]).
    first: Vec<Boxing>,
    /// The region that this rank has before. `result` is that after.
    held: Option<Region>,
    result: Option<Region>,
    slice: Option<Region>,
    reduce: Option<Reduce>,
    /// Parts of the result that this rank has itself, and that are not reduced there.
    own: Vec<Region>,
    exchange: Option<Exchange>,
    /// Copies and sums are all of the result.
    is_covered: bool,
}

impl Boxing {
    /// Returns the boxing of tensors of this shape between two layouts, on this rank, kept once it
    /// is made.
    pub fn between(
        runtime: &Runtime,
        shape: &[usize],
        from: TensorLayout,
        to: TensorLayout,
    ) -> Arc<Self> {
        thread_local! {
            static KEY: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
        }
        let known = runtime.part::<Cache<Self>>();
        KEY.with_borrow_mut(|key| {
            key.clear();
            add_numbers(key, shape);
            for TensorLayout { placement, sbp } in [from, to] {
                add_numbers(key, placement.ranks());
                add_numbers(key, placement.shape());
                key.extend(sbp.iter().map(|sbp| match *sbp {
                    Sbp::Split(dim) => dim as u64,
                    Sbp::Broadcast => u64::MAX,
                    Sbp::Partial(op) => u64::MAX - 1 - op as u64,
                }));
            }
            known.get(key).unwrap_or_else(|| {
                let boxing = Arc::new(Self::new(runtime.rank(), shape, from, to));
                known.insert(key, &boxing);
                boxing
            })
        })
    }

    /// Makes the boxing of tensors of this shape, on this rank. The layouts fit it
    /// ([`crate::region::check`]).
    pub fn new(rank: usize, shape: &[usize], from: TensorLayout, to: TensorLayout) -> Self {
        let layouts = [from, to].map(|of| (of.placement.without_group(), of.sbp.to_vec()));
        if let Some((placement, between)) = between(from, to) {
            let between = TensorLayout { placement, sbp: &between };
            let mut one = Self::new(rank, shape, from, between);
            let mut last = Self::new(rank, shape, between, to);
            let mut first = std::mem::take(&mut one.first);
            first.push(one);
            first.append(&mut last.first);
            return Self { first, layouts, ..last };
        }
        let plan = BoxingPlan::new(shape, from, to);
        let what = (shape, from.placement, from.sbp, to.placement, to.sbp);
        let text = format!("boxing({shape:?} {}) -> {}", text(from.sbp), text(to.sbp));
        let operation = AgreedOperation::new(from.placement, ("boxing", what), text, false);
        let shares = Shares {
            plan: &plan,
            from,
            to,
            held: regions(from.placement, from.sbp, shape),
            digest: digest(&what),
            placement: (from.placement == to.placement).then(|| operation.placement()),
        };
        let position = from.placement.position(rank);
        let target = to.placement.position(rank);
        Self {
            rank,
            shape: shape.to_vec(),
            layouts,
            of_parts: OnceLock::new(),
            first: Vec::new(),
            held: position.map(|position| shares.held[position].clone()),
            result: target.map(|target| plan.results[target].clone()),
            slice: plan.slice(rank).cloned(),
            reduce: shares.reduce(rank),
            own: shares.own(rank),
            exchange: shares.exchange(rank),
            is_covered: shares.covered(rank).is_some(),
            operation,
            plan,
        }
    }

    /// Returns the boxing of complex tensors as real ones: the real and the imaginary parts are one
    /// more dimension.
    fn of_parts(&self) -> &Self {
        self.of_parts.get_or_init(|| {
            let shape = [&self.shape[..], &[2]].concat();
            let [from, to] = &self.layouts;
            let from = TensorLayout { placement: &from.0, sbp: &from.1 };
            let to = TensorLayout { placement: &to.0, sbp: &to.1 };
            Box::new(Self::new(self.rank, &shape, from, to))
        })
    }

    /// Returns whether it adds up partial sums, or takes their mean, and reduces in no other way.
    fn adds(&self) -> bool {
        let steps = self.first.iter().chain([self]);
        let ops: Vec<_> = steps.filter_map(|step| Some(step.plan.reduction.as_ref()?.op)).collect();
        !ops.is_empty() && ops.iter().all(|op| matches!(op, ReduceOp::Sum | ReduceOp::Avg))
    }

    /// Checks that there are reductions of this kind, as [`Boxing::run`] needs them.
    ///
    /// # Errors
    /// There is none.
    pub fn check_kind(&self, kind: Kind) -> Result<()> {
        let reduced = if self.adds() { real(kind) } else { kind };
        let mut steps = self.first.iter().chain([self]);
        let reduces = steps.any(|step| step.plan.reduction.is_some());
        let is_known = flow_autograd::dtype(reduced).is_some()
            || matches!(reduced, Kind::Bool | Kind::Int8 | Kind::Int16);
        if reduces && !is_known {
            return Err(Error::Unsupported {
                operation: "boxing".to_owned(),
                reason: format!(
                    "partial values of kind {kind:?} cannot be reduced; convert by to_kind"
                ),
            });
        }
        Ok(())
    }

    /// Returns the plan that it carries out.
    pub fn plan(&self) -> &BoxingPlan {
        &self.plan
    }

    /// Returns what is counted where the program asks for it.
    pub(crate) fn operation(&self) -> &Arc<AgreedOperation> {
        &self.operation
    }

    /// Returns whether the result is a part of what this rank has, with its memory.
    pub fn is_view(&self) -> bool {
        self.slice.is_some() && self.first.is_empty()
    }

    /// Carries it out; all ranks of both placements call this. `local` is what this rank has: None
    /// on ranks outside the old placement. Returns what it has then: None outside the new one.
    ///
    /// # Errors
    /// A collective fails, or there is no reduction of this kind.
    pub fn run(
        &self,
        groups: &Groups,
        (kind, device): (Kind, Device),
        local: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        self.check_kind(kind)?;
        let local = local.map(in_memory);
        let local = local.as_ref();
        if self.adds() && real(kind) != kind {
            let parts = local.map(Tensor::view_as_real);
            let parts = self.of_parts().run(groups, (real(kind), device), parts.as_ref())?;
            return Ok(parts.map(|parts| parts.view_as_complex()));
        }
        let mut between = None;
        for (index, step) in self.first.iter().enumerate() {
            let own = if index == 0 { local } else { between.as_ref() };
            between = step.run_plan(groups, (kind, device), own)?;
        }
        let own = if self.first.is_empty() { local } else { between.as_ref() };
        self.run_plan(groups, (kind, device), own)
    }

    fn run_plan(
        &self,
        groups: &Groups,
        (kind, device): (Kind, Device),
        local: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        let held = self.held.as_ref().zip(local);
        if let (Some(slice), Some((held, local))) = (&self.slice, held) {
            return Ok(Some(view(local, held, slice)));
        }
        if self.plan.reduction.is_some() && flow_autograd::dtype(kind).is_none() {
            let wide = local.map(|local| local.to_kind(Kind::Int));
            let result = self.run_plan(groups, (Kind::Int, device), wide.as_ref())?;
            return Ok(result.map(|result| result.to_kind(kind)));
        }
        let mut result = self.result.as_ref().map(|region| {
            if self.is_covered {
                Part::empty(region, (kind, device))
            } else {
                let tensor = Tensor::full(memory::sizes(region), self.plan.filler, (kind, device));
                Part { tensor, region: region.clone() }
            }
        });
        let mut source = held.map(|(held, local)| Part::new(local, held));
        if let (Some(reduce), Some(terms)) =
            (&self.reduce, source.take_if(|_| self.plan.reduction.is_some()))
        {
            let reduced = reduce.run(groups, &terms, result.as_ref());
            match reduced.map_err(|error| reduce.members.explained(error, groups))? {
                Reduced::Part(part) => source = part,
                Reduced::All => return Ok(result.map(|result| result.tensor)),
            }
        }
        match &self.exchange {
            Some(exchange) => exchange
                .run(groups, (kind, device), source.as_ref(), result.as_mut(), &self.own)
                .map_err(|error| exchange.members.explained(error, groups))?,
            None => copy_all(&self.own, source.as_ref(), result.as_ref()),
        }
        Ok(result.map(|result| result.tensor))
    }
}

/// Copies regions that this rank has, and needs.
fn copy_all(regions: &[Region], source: Option<&Part>, result: Option<&Part>) {
    let Some(source) = source else { return };
    let Some(result) = result else { return };
    for region in regions {
        source.copy(region, result);
    }
}

/// Appends numbers, and how many there are.
fn add_numbers(key: &mut Vec<u64>, numbers: &[usize]) {
    key.push(numbers.len() as u64);
    key.extend(numbers.iter().map(|&number| number as u64));
}

/// Returns what comes between two layouts, and on which placement, if one plan cannot connect them:
/// partial values of different reductions do not commute. Those of inner axes (the last ones) are
/// reduced before those of outer axes, also if they stay partial in the end. New ones are made
/// after those of outer axes.
fn between<'a>(from: TensorLayout<'a>, to: TensorLayout<'a>) -> Option<(&'a Placement, NdSbp)> {
    without_last(from, to, Sbp::is_partial).or_else(|| without_last(to, from, has_terms))
}

/// Returns whether new partial values are terms: maxima, minima and means are copies.
fn has_terms(sbp: Sbp) -> bool {
    matches!(sbp, Sbp::Partial(op) if neutral(op).is_some())
}

/// Returns the layout with its last partial axis B, if that, or one before it, has another
/// reduction than the first axis that changes. `is_counted` says which SBPs are partial.
fn without_last<'a>(
    layout: TensorLayout<'a>,
    other: TensorLayout,
    is_counted: fn(Sbp) -> bool,
) -> Option<(&'a Placement, NdSbp)> {
    let TensorLayout { placement, sbp } = layout;
    let partial: Vec<usize> = (0..sbp.len())
        .filter(|&axis| is_counted(sbp[axis]) && placement.shape()[axis] > 1)
        .collect();
    let moves = placement != other.placement;
    let first = *partial.iter().find(|&&axis| moves || sbp[axis] != other.sbp[axis])?;
    if !partial.iter().any(|&axis| axis > first && sbp[axis] != sbp[first]) {
        return None;
    }
    let mut between = sbp.to_vec();
    between[*partial.last()?] = B;
    Some((placement, between))
}

/// The result of a reduction.
enum Reduced {
    /// This rank's part of the sum.
    Part(Option<Part>),
    /// All of the result.
    All,
}

impl Reduce {
    fn run(&self, groups: &Groups, terms: &Part, result: Option<&Part>) -> Result<Reduced> {
        let group = self.members.group(groups)?;
        let kind = terms.tensor.kind();
        let device = terms.tensor.device();
        let bytes = self.held.elements() * kind.elt_size_in_bytes();
        let is_small = self.is_all_reduce && bytes <= SMALL;
        let in_result = result.filter(|_| self.is_in_result || is_small);
        let target = match (in_result, &self.own) {
            (Some(result), _) => Some(result.share()),
            (None, own) => own.as_ref().map(|own| Part::empty(own, (kind, device))),
        };
        let part = if is_small { Some(&self.held) } else { self.own.as_ref() };
        if groups.reads_peers && device == Device::Cpu {
            let counts = vec![self.held.elements(); self.members.ranks.len()];
            let agreed = self.members.agreed(groups);
            let is_read = group.read_peers(&terms.memory(), &counts, agreed, |peers| {
                if let Some(part) = part
                    && let Some(target) = &target
                {
                    self.reduce_from(peers, groups, part, target);
                }
            })?;
            if is_read {
                return Ok(if is_small { Reduced::All } else { Reduced::Part(target) });
            }
        }
        let group = &group.with_digest(self.members.agreed(groups));
        if self.is_all_reduce
            && let Some(result) = result
        {
            packed::all_reduce(group, self, terms, result)?;
            return Ok(Reduced::All);
        }
        let sum = packed::reduce_scatter(group, self, terms)?;
        Ok(Reduced::Part(match (sum, in_result) {
            (Some(sum), Some(result)) => {
                result.view(&sum.region).copy_(&sum.tensor);
                Some(result.share())
            }
            (sum, _) => sum,
        }))
    }

    /// Reduces a part of what the members have into `target`, by reading their memory.
    fn reduce_from(&self, peers: &Peers, groups: &Groups, part: &Region, target: &Part) {
        let mut memory = target.memory();
        let size = target.element_size();
        let to = memory.bytes_mut();
        runs(part, &self.held, &target.region, |from, at, length| {
            peers.reduce(from..from + length, self.op, &mut to[at * size..(at + length) * size]);
        });
        let others = self.members.ranks.len() - 1;
        groups.count(others * part.elements() * size);
    }
}

impl Exchange {
    /// Regions `own` are copied from `source`: while other ranks read its memory, where they can.
    fn run(
        &self,
        groups: &Groups,
        (kind, device): (Kind, Device),
        source: Option<&Part>,
        result: Option<&mut Part>,
        own: &[Region],
    ) -> Result<()> {
        let group = self.members.group(groups)?;
        let rank = groups.rank();
        let size = kind.elt_size_in_bytes();
        let received = self.copies.iter().filter(|copy| copy.to == rank);
        groups.count(received.map(|copy| copy.region.elements()).sum::<usize>() * size);
        if groups.reads_peers && device == Device::Cpu {
            let units = if flow_autograd::dtype(kind).is_some() { 1 } else { size };
            let counts: Vec<usize> = self.counts().map(|count| count * units).collect();
            let shows = counts[group.rank()] > 0;
            let nothing = Part::empty(&Region::all(&[0]), (kind, device));
            let shown = source.filter(|_| shows).unwrap_or(&nothing).memory();
            let agreed = self.members.agreed(groups);
            let is_read = group.read_peers(&shown, &counts, agreed, |peers| {
                copy_all(own, source, result.as_deref());
                if let Some(result) = &result {
                    self.copy_from(peers, rank, result);
                }
            })?;
            if is_read {
                return Ok(());
            }
        }
        copy_all(own, source, result.as_deref());
        let group = &group.with_digest(self.members.agreed(groups));
        packed::exchange(group, self, (rank, kind, device), source, result)
    }

    /// Returns the number of elements that each member shows.
    pub fn counts(&self) -> impl Iterator<Item = usize> {
        self.shown.iter().map(|shown| shown.as_ref().map_or(0, Region::elements))
    }

    /// Copies what `rank` needs into its result, by reading the members' memory.
    fn copy_from(&self, peers: &Peers, rank: usize, result: &Part) {
        let mut memory = result.memory();
        let to = memory.bytes_mut();
        for copy in self.copies.iter().filter(|copy| copy.to == rank) {
            let member = self.members.ranks.iter().position(|&other| other == copy.from);
            let Some(member) = member else { continue };
            let Some(shown) = &self.shown[member] else { continue };
            let from = (peers.bytes(member), shown);
            memory::copy(&copy.region, from, (to, &result.region), result.element_size());
        }
    }
}
