//! What leaders add up between nodes: the sum of each node, or of each subtree of virtual ranks.

use super::kernel::{reduce_nodes, sum_in_tree};
use super::partition::ScatteredMemory;
use crate::descriptor::OpDescriptor;
use crate::group::core::GroupCore;
use crate::shm::segments::Segments;
use crate::virtual_ranks::NodeTree;

/// What is added up between nodes.
pub struct Addends<'a> {
    /// This node's, in order. The result comes to the first.
    pub own: Vec<ScatteredMemory>,
    /// The node of each.
    pub nodes: Vec<usize>,
    /// The tree in which they are added up; None: one after the other.
    tree: Option<&'a NodeTree>,
}

impl<'a> Addends<'a> {
    /// Returns what is added up where each node has a sum, that of this node in `memory`.
    pub fn of_nodes(memory: ScatteredMemory, nodes: usize) -> Self {
        Self { own: vec![memory], nodes: (0..nodes).collect(), tree: None }
    }

    /// Returns what is added up of a bucket, whose pieces lie at these places on the members of this node.
    pub fn of_bucket(segments: &'a Segments, places: &[Vec<*mut u8>], core: &GroupCore) -> Self {
        let memory = |local: usize| {
            let pieces = places.iter().zip(&segments.lengths);
            let pieces = pieces.map(|(places, &length)| (places[local], length)).collect();
            ScatteredMemory::new(pieces, segments.dtype)
        };
        let Some(tree) = &segments.tree else {
            return Self::of_nodes(memory(0), core.leaders.len());
        };
        let mut own = Vec::new();
        for subtree in tree.of_node(core.nodes[core.rank]) {
            own.push(memory(core.locals.partition_point(|&rank| rank < subtree.members.start)));
        }
        let nodes = tree.subtrees.iter().map(|subtree| subtree.node).collect();
        Self { own, nodes, tree: Some(tree) }
    }

    /// Returns where the result comes to.
    pub fn result(&self) -> &ScatteredMemory {
        &self.own[0]
    }

    /// Adds up `count` elements.
    ///
    /// # Safety
    ///
    /// As for [`reduce_nodes`].
    pub unsafe fn add(
        &self,
        operation: &OpDescriptor,
        from: &[*const u8],
        to: *mut u8,
        count: usize,
        size: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.tree {
                Some(tree) => {
                    sum_in_tree(operation, &tree.sums, from, &[to], count, Some(tree.count))
                }
                None => reduce_nodes(operation, from, &[to], count, size),
            }
        }
    }
}
