//! Virtual ranks: the fixed parts of a sum, which any number of ranks add up to the same bits.

use std::ops::Range;

/// The most virtual ranks: a kernel adds up a tree of so many numbers.
const MAX: usize = 65_536;

/// The virtual ranks of each rank of a group, and the tree in which what they compute is added up.
///
/// The tree depends on the number of virtual ranks only: all of them are halved, the first half being the
/// larger one, until each is by itself. A rank has the virtual ranks of a whole subtree, so that it adds up
/// a number of its own. To find the subtrees, the largest one is halved until there is one for each rank.
///
/// ```
/// use flow_comm::VirtualRanks;
///
/// let ranks = VirtualRanks::new(4, 3).unwrap();
/// assert_eq!([0, 1, 2].map(|rank| ranks.of_rank(rank)), [0..1, 1..2, 2..4]);
/// assert_eq!(VirtualRanks::sums(&ranks.of_rank(2)), [0, 1]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualRanks {
    /// By rank, in order.
    parts: Vec<Range<usize>>,
}

impl VirtualRanks {
    /// Divides `count` virtual ranks among so many ranks.
    ///
    /// # Errors
    ///
    /// A line that says why: there are fewer than the ranks, or more than 65,536.
    pub fn new(count: usize, ranks: usize) -> Result<Self, String> {
        if count < ranks {
            return Err(format!(
                "virtual_ranks({count}): there are more ranks, {ranks}: run as many at most, or choose a \
                 larger number"
            ));
        }
        if count > MAX {
            return Err(format!("virtual_ranks({count}): there are at most {MAX}"));
        }
        let mut parts = Vec::with_capacity(ranks);
        parts.push(0..count);
        while parts.len() < ranks {
            let longest = parts.iter().map(|part| part.len()).max();
            let index = parts.iter().position(|part| Some(part.len()) == longest).unwrap_or(0);
            let [first, second] = halves(&parts[index]);
            parts.splice(index..=index, [first, second]);
        }
        Ok(Self { parts })
    }

    /// Returns the number of virtual ranks.
    pub fn count(&self) -> usize {
        self.parts.last().map_or(0, |part| part.end)
    }

    /// Returns the virtual ranks of a rank.
    pub fn of_rank(&self, rank: usize) -> Range<usize> {
        self.parts[rank].clone()
    }

    /// Returns how the numbers of a subtree's virtual ranks are added up: after each, so many times the last
    /// two that are not added up yet are replaced by their sum.
    pub fn sums(subtree: &Range<usize>) -> Vec<usize> {
        let leaves: Vec<Range<usize>> = subtree.clone().map(|leaf| leaf..leaf + 1).collect();
        sums_of(subtree, &leaves)
    }
}

/// Returns the subtrees below one of two virtual ranks or more.
fn halves(subtree: &Range<usize>) -> [Range<usize>; 2] {
    let middle = subtree.start + subtree.len().div_ceil(2);
    [subtree.start..middle, middle..subtree.end]
}

/// Returns how these subtrees, which make up `subtree`, are added up: see [`VirtualRanks::sums`].
fn sums_of(subtree: &Range<usize>, parts: &[Range<usize>]) -> Vec<usize> {
    if parts.len() <= 1 {
        return vec![0; parts.len()];
    }
    let [first, second] = halves(subtree);
    let (left, right) = parts.split_at(parts.partition_point(|part| part.end <= first.end));
    let mut sums = sums_of(&first, left);
    sums.extend(sums_of(&second, right));
    if let Some(last) = sums.last_mut() {
        *last += 1;
    }
    sums
}

/// The tree of virtual ranks over the nodes of a group.
#[derive(Debug)]
pub(crate) struct NodeTree {
    /// The nodes of the ranks.
    pub nodes: Vec<usize>,
    /// The number of virtual ranks.
    pub count: usize,
    /// The largest subtrees that have ranks of one node only, in order.
    pub subtrees: Vec<Subtree>,
    /// How these are added up.
    pub sums: Vec<usize>,
}

/// A subtree that has ranks of one node only.
#[derive(Debug)]
pub(crate) struct Subtree {
    pub node: usize,
    pub members: Range<usize>,
    /// How the members' numbers are added up.
    pub sums: Vec<usize>,
}

impl NodeTree {
    /// Returns the tree over ranks that are on these nodes.
    pub fn new(ranks: &VirtualRanks, nodes: &[usize]) -> Self {
        let mut subtrees = Vec::new();
        let whole = 0..ranks.count();
        find_subtrees(&whole, 0..nodes.len(), ranks, nodes, &mut subtrees);
        let mut parts = Vec::with_capacity(subtrees.len());
        for Subtree { members, .. } in &subtrees {
            parts.push(ranks.parts[members.start].start..ranks.parts[members.end - 1].end);
        }
        Self { nodes: nodes.to_vec(), count: whole.end, sums: sums_of(&whole, &parts), subtrees }
    }

    /// Returns the subtrees of a node, in order.
    pub fn of_node(&self, node: usize) -> impl Iterator<Item = &Subtree> {
        self.subtrees.iter().filter(move |subtree| subtree.node == node)
    }
}

/// Finds the largest subtrees of `subtree`, which has these members, that are on one node.
fn find_subtrees(
    subtree: &Range<usize>,
    members: Range<usize>,
    ranks: &VirtualRanks,
    nodes: &[usize],
    found: &mut Vec<Subtree>,
) {
    let node = nodes[members.start];
    let parts = &ranks.parts[members.clone()];
    if nodes[members.clone()].iter().all(|&other| other == node) {
        found.push(Subtree { node, sums: sums_of(subtree, parts), members });
        return;
    }
    let [first, second] = halves(subtree);
    let middle = members.start + parts.partition_point(|part| part.end <= first.end);
    find_subtrees(&first, members.start..middle, ranks, nodes, found);
    find_subtrees(&second, middle..members.end, ranks, nodes, found);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the tree of a sum as text.
    fn added(numbers: &[String], sums: &[usize]) -> String {
        let mut waiting: Vec<String> = Vec::new();
        for (number, &sums) in numbers.iter().zip(sums) {
            waiting.push(number.clone());
            for _ in 0..sums {
                let right = waiting.pop().unwrap();
                let left = waiting.pop().unwrap();
                waiting.push(format!("({left}+{right})"));
            }
        }
        assert_eq!(waiting.len(), 1);
        waiting.remove(0)
    }

    fn whole(count: usize) -> String {
        let leaves: Vec<String> = (0..count).map(|leaf| leaf.to_string()).collect();
        added(&leaves, &VirtualRanks::sums(&(0..count)))
    }

    #[test]
    fn the_tree_is_balanced() {
        assert_eq!(whole(1), "0");
        assert_eq!(whole(3), "((0+1)+2)");
        assert_eq!(whole(4), "((0+1)+(2+3))");
        assert_eq!(whole(7), "(((0+1)+(2+3))+((4+5)+6))");
    }

    #[test]
    fn a_rank_has_some_and_there_is_a_limit() {
        assert!(VirtualRanks::new(2, 3).unwrap_err().contains("there are more ranks, 3"));
        assert!(VirtualRanks::new(0, 1).is_err());
        assert!(VirtualRanks::new(MAX, 1).is_ok());
        assert!(VirtualRanks::new(MAX + 1, 1).unwrap_err().contains("at most 65536"));
    }

    proptest! {
        /// Ranks add up their virtual ranks, then those of a node, then the nodes: whatever they are, that is
        /// the tree of one rank.
        #[test]
        fn all_ranks_and_nodes_add_up_one_tree(
            count in 1usize..40,
            share in 0.0..1.0,
            nodes in prop::collection::vec(0usize..4, 40),
        ) {
            let size = 1 + (share * count as f64) as usize;
            let ranks = VirtualRanks::new(count, size).unwrap();
            let tree = NodeTree::new(&ranks, &nodes[..size]);
            let mut end = 0;
            let mut subtrees = Vec::new();
            for subtree in &tree.subtrees {
                let mut of_ranks = Vec::new();
                for rank in subtree.members.clone() {
                    prop_assert_eq!(nodes[rank], subtree.node);
                    let own = ranks.of_rank(rank);
                    prop_assert_eq!(own.start, end);
                    end = own.end;
                    let numbers: Vec<String> = own.clone().map(|one| one.to_string()).collect();
                    of_ranks.push(added(&numbers, &VirtualRanks::sums(&own)));
                }
                subtrees.push(added(&of_ranks, &subtree.sums));
            }
            prop_assert_eq!(end, count);
            prop_assert_eq!(added(&subtrees, &tree.sums), whole(count));
        }

        /// No rank has twice as many as another, but for the last one.
        #[test]
        fn virtual_ranks_are_dealt_out_evenly(count in 1usize..200, share in 0.0..1.0) {
            let size = 1 + (share * count as f64) as usize;
            let ranks = VirtualRanks::new(count, size).unwrap();
            let numbers: Vec<usize> = (0..size).map(|rank| ranks.of_rank(rank).len()).collect();
            let least = numbers.iter().min().unwrap();
            prop_assert!(numbers.iter().all(|most| *most <= 2 * least + 1), "{:?}", numbers);
        }
    }
}
