//! Plans of boxing: how a tensor gets from one placement and SBP to another, with as few bytes as
//! that needs. Pure.
//!
//! A plan has at most two phases. First the partial values of axes that are not partial in the
//! result are reduced by reduce-scatter. Each rank of a group gets the sum of a part. Then ranks
//! copy from each other what they need and do not have. Where that is possible, the parts are what
//! the ranks need in the end, and nothing is copied (P to S). Where all need all, the two phases
//! are an all-reduce (P to B).

use std::collections::BTreeMap;

use flow_comm::ReduceOp;

use crate::placement::Placement;
use crate::region::{Region, regions};
use crate::sbp::{NdSbp, Sbp, neutral};

/// The layout of a tensor: on which ranks, and how on each axis.
#[derive(Clone, Copy, Debug)]
pub struct TensorLayout<'a> {
    /// The ranks.
    pub placement: &'a Placement,
    /// One for each axis.
    pub sbp: &'a [Sbp],
}

/// A plan of how tensors of one shape get from one layout to another.
#[derive(Clone, Debug, PartialEq)]
pub struct BoxingPlan {
    /// The first phase, if there are partial values to reduce.
    pub reduction: Option<Reduction>,
    /// The copies of ranks of the new placement, from others or from themselves.
    pub copies: Vec<Copy>,
    /// The region of each rank of the new placement in the end, by position. Elements that it does not
    /// copy are `filler`: the rest of its partial values.
    pub results: Vec<Region>,
    /// The value that leaves what it is reduced with as it is: 0 in sums, 1 in products.
    pub filler: f64,
    /// Whether both phases together are an all-reduce in each group of the reduction: all ranks
    /// keep their regions, which are reduced.
    pub is_all_reduce: bool,
}

/// The first phase: reduce-scatters among ranks of the old placement.
#[derive(Clone, Debug, PartialEq)]
pub struct Reduction {
    /// The reduction of partial values.
    pub op: ReduceOp,
    /// The positions whose partial values are reduced together, by group.
    pub groups: Vec<Vec<usize>>,
    /// The region that each rank of the old placement reduces, by position; None for nothing.
    pub parts: Vec<Option<Region>>,
}

/// A region that rank `to` gets from rank `from`, which may be the same.
#[derive(Clone, Debug, PartialEq)]
pub struct Copy {
    /// The rank that has it.
    pub from: usize,
    /// The rank that needs it.
    pub to: usize,
    /// The region of the tensor.
    pub region: Region,
}

impl BoxingPlan {
    /// Makes the plan for a tensor of this shape. The layouts fit it ([`crate::region::check`]).
    /// Those axes whose partial values are reduced have one reduction, and so have those that get
    /// new ones.
    pub fn new(shape: &[usize], from: TensorLayout, to: TensorLayout) -> Self {
        let (old, new) = plain(from, to);
        let from = TensorLayout { sbp: &old, ..from };
        let to = TensorLayout { sbp: &new, ..to };
        let held = regions(from.placement, from.sbp, shape);
        let results = regions(to.placement, to.sbp, shape);
        let axes = Axes::new(from, to);
        let is_all_reduce = from.placement == to.placement
            && held == results
            && !axes.reduced.is_empty()
            && axes.new_terms.is_empty();
        let reduction = axes.reduced.first().and_then(|&axis| {
            let Sbp::Partial(op) = from.sbp[axis] else { return None };
            let groups = groups(from.placement, &axes.reduced);
            let parts = parts(from, to, &groups, &held, &results);
            Some(Reduction { op, groups, parts })
        });
        let sources = match &reduction {
            Some(reduction) => reduction.parts.clone(),
            None => held.into_iter().map(Some).collect(),
        };
        let needed = needed(from, to, &axes.new_terms, &sources, &results);
        let copies = copies(from, to, &axes.kept_terms, &sources, &needed);
        let filler = axes.new_terms.first().and_then(|&axis| match to.sbp[axis] {
            Sbp::Partial(op) => neutral(op),
            _ => None,
        });
        Self { reduction, copies, results, filler: filler.unwrap_or(0.0), is_all_reduce }
    }

    /// Returns the result of a rank that had all of it before: nobody communicates with it.
    pub fn slice(&self, rank: usize) -> Option<&Region> {
        let mut own = self.copies.iter().filter(|copy| copy.from == rank || copy.to == rank);
        let first = own.next()?;
        let others = own.next();
        let is_slice = self.reduction.is_none()
            && others.is_none()
            && first.from == first.to
            && self.results.contains(&first.region);
        is_slice.then_some(&first.region)
    }

    /// Returns how many elements all ranks together receive from others.
    pub fn received(&self) -> usize {
        let reduced = self.reduction.as_ref().map_or(0, Reduction::received);
        let copied = self.copies.iter().filter(|copy| copy.from != copy.to);
        reduced + copied.map(|copy| copy.region.elements()).sum::<usize>()
    }
}

impl Reduction {
    /// Returns how many elements all ranks together receive from others: each rank of a group those
    /// of its part, from each other.
    fn received(&self) -> usize {
        let mut received = 0;
        for group in &self.groups {
            let parts = group.iter().filter_map(|&position| self.parts[position].as_ref());
            received += (group.len() - 1) * parts.map(Region::elements).sum::<usize>();
        }
        received
    }
}

/// Returns the SBPs as plans know them. On an axis of one rank all are B. New partial values that
/// may be copies, as for a maximum, are B, too.
fn plain(from: TensorLayout, to: TensorLayout) -> (NdSbp, NdSbp) {
    let old = without_single(from);
    let mut new = without_single(to);
    let is_same = from.placement == to.placement;
    for (axis, sbp) in new.iter_mut().enumerate() {
        let is_new = !is_same || old[axis] != *sbp;
        if is_new && matches!(*sbp, Sbp::Partial(op) if neutral(op).is_none()) {
            *sbp = Sbp::Broadcast;
        }
    }
    (old, new)
}

/// Returns the SBP of a layout, but B on axes of one rank.
fn without_single(layout: TensorLayout) -> NdSbp {
    let axes = layout.sbp.iter().zip(layout.placement.shape());
    axes.map(|(&sbp, &extent)| if extent == 1 { Sbp::Broadcast } else { sbp }).collect()
}

/// The axes that have to do with partial values.
struct Axes {
    /// Old partial axes that stay as they are.
    kept_terms: Vec<usize>,
    /// Old partial axes that are reduced.
    reduced: Vec<usize>,
    /// Partial axes of the new layout that the old one does not have.
    new_terms: Vec<usize>,
}

impl Axes {
    fn new(from: TensorLayout, to: TensorLayout) -> Self {
        let is_same = from.placement == to.placement;
        let (kept_terms, reduced) =
            partial(from.sbp).partition(|&axis| is_same && from.sbp[axis] == to.sbp[axis]);
        let new_terms =
            partial(to.sbp).filter(|&axis| !is_same || from.sbp[axis] != to.sbp[axis]).collect();
        Self { kept_terms, reduced, new_terms }
    }
}

/// Returns the partial axes.
fn partial(sbp: &[Sbp]) -> impl Iterator<Item = usize> {
    (0..sbp.len()).filter(|&axis| sbp[axis].is_partial())
}

/// Returns the positions that differ in these axes' coordinates only, in the order of those.
pub(crate) fn groups(placement: &Placement, axes: &[usize]) -> Vec<Vec<usize>> {
    let mut groups = BTreeMap::<Vec<usize>, Vec<usize>>::new();
    for position in 0..placement.ranks().len() {
        let mut key = placement.coordinates(position);
        axes.iter().for_each(|&axis| key[axis] = 0);
        groups.entry(key).or_default().push(position);
    }
    groups.into_values().collect()
}

/// Returns what each position has after the reduction. That is what it needs in the end, if the
/// needs of its group divide what the group has; else an equal part.
fn parts(
    from: TensorLayout,
    to: TensorLayout,
    groups: &[Vec<usize>],
    held: &[Region],
    results: &[Region],
) -> Vec<Option<Region>> {
    let mut parts = vec![None; held.len()];
    for group in groups {
        let all = &held[group[0]];
        let mut needs = Vec::new();
        for &position in group {
            let target = to.placement.position(from.placement.ranks()[position]);
            needs.push(target.and_then(|target| all.intersection(&results[target])));
        }
        let is_divided = divides(&needs, all);
        for (index, (&position, need)) in group.iter().zip(needs).enumerate() {
            parts[position] = match cut_dim(all, group.len()) {
                _ if is_divided => need,
                Some(dim) => Some(all.part(dim, group.len(), index)),
                None => (index == 0).then(|| all.clone()),
            };
        }
    }
    parts
}

/// Returns whether regions are disjoint and together a whole.
fn divides(regions: &[Option<Region>], whole: &Region) -> bool {
    let regions: Vec<&Region> = regions.iter().flatten().collect();
    let are_disjoint = regions.iter().enumerate().all(|(index, region)| {
        regions[..index].iter().all(|other| region.intersection(other).is_none())
    });
    are_disjoint
        && regions.iter().map(|region| region.elements()).sum::<usize>() == whole.elements()
}

/// Returns the dimension along which a region is cut into equal parts. It is the first that is long
/// enough, as its parts are contiguous, else the longest. None without dimensions.
fn cut_dim(region: &Region, parts: usize) -> Option<usize> {
    let shape = region.shape();
    let longest = (0..shape.len()).rev().max_by_key(|&dim| shape[dim]);
    shape.iter().position(|&size| size >= parts).or(longest)
}

/// Returns what each position of the new placement must have that is not zero. Of the ranks along a
/// new partial axis, each has what it had before. That is so if it is all together, and alike for
/// all at the same place of the axis. Else the first has all.
fn needed(
    from: TensorLayout,
    to: TensorLayout,
    new_terms: &[usize],
    sources: &[Option<Region>],
    results: &[Region],
) -> Vec<Option<Region>> {
    let mut needed: Vec<_> = results.iter().cloned().map(Some).collect();
    if new_terms.is_empty() {
        return needed;
    }
    let axes: Vec<usize> = (0..to.sbp.len())
        .filter(|axis| to.sbp[*axis] == Sbp::Broadcast || new_terms.contains(axis))
        .collect();
    for alike in groups(to.placement, &axes) {
        let whole = &results[alike[0]];
        let mut groups = groups(to.placement, new_terms);
        groups.retain(|group| group.iter().all(|position| alike.contains(position)));
        let parts: Vec<Vec<Option<Region>>> = groups
            .iter()
            .map(|group| group.iter().map(|&at| kept(from, to, sources, results, at)).collect())
            .collect();
        let is_divided = parts.iter().all(|of| *of == parts[0]) && divides(&parts[0], whole);
        for (group, parts) in groups.into_iter().zip(parts) {
            for (index, (position, part)) in group.into_iter().zip(parts).enumerate() {
                let all = (index == 0).then(|| whole.clone());
                needed[position] = if is_divided { part } else { all };
            }
        }
    }
    needed
}

/// Returns what the rank at a position of the new placement has before of what it gets.
fn kept(
    from: TensorLayout,
    to: TensorLayout,
    sources: &[Option<Region>],
    results: &[Region],
    position: usize,
) -> Option<Region> {
    let source = from.placement.position(to.placement.ranks()[position])?;
    sources[source].as_ref()?.intersection(&results[position])
}

/// Copies to each position of the new placement what it needs. It comes from the position's own
/// rank if that has it, else from the holder that is nearest in the mesh. So holders share the
/// work.
fn copies(
    from: TensorLayout,
    to: TensorLayout,
    kept_terms: &[usize],
    sources: &[Option<Region>],
    needed: &[Option<Region>],
) -> Vec<Copy> {
    let is_same = from.placement == to.placement;
    let coordinates: Vec<_> =
        (0..sources.len()).map(|position| from.placement.coordinates(position)).collect();
    // The holders of each region, and, of partial values that stay, of each of these.
    let mut tiles = BTreeMap::<_, (&Region, Vec<usize>)>::new();
    for (position, region) in sources.iter().enumerate() {
        let Some(region) = region else { continue };
        let terms: Vec<_> = kept_terms.iter().map(|&axis| coordinates[position][axis]).collect();
        let bounds: Vec<_> = region.0.iter().map(|range| (range.start, range.end)).collect();
        let (_, holders) = tiles.entry((terms, bounds)).or_insert_with(|| (region, Vec::new()));
        holders.push(position);
    }
    let mut copies = Vec::new();
    for (target, needed) in needed.iter().enumerate() {
        let Some(needed) = needed else { continue };
        let rank = to.placement.ranks()[target];
        let own = to.placement.coordinates(target);
        for ((terms, _), (held, holders)) in &tiles {
            let is_own_term = kept_terms.iter().zip(terms).all(|(&axis, &at)| own[axis] == at);
            let Some(region) = needed.intersection(held).filter(|_| is_own_term) else { continue };
            let itself = holders.iter().find(|&&holder| from.placement.ranks()[holder] == rank);
            let holder = match itself {
                Some(&holder) => holder,
                None if is_same => holders
                    .iter()
                    .copied()
                    .min_by_key(|&holder| (distance(&coordinates[holder], &own), holder))
                    .unwrap_or_default(),
                None => holders[target % holders.len()],
            };
            copies.push(Copy { from: from.placement.ranks()[holder], to: rank, region });
        }
    }
    copies
}

/// Returns in how many axes two coordinates differ.
fn distance(one: &[usize], other: &[usize]) -> usize {
    one.iter().zip(other).filter(|(one, other)| one != other).count()
}
