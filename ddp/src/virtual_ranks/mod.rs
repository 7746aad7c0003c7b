//! Virtual ranks: a step's gradients are computed in a fixed number of parts, by any number of ranks.
//!
//! Each virtual rank's backward begins without gradients, and leaves its own. Those of a rank are added up
//! in the tree of [`flow_comm::VirtualRanks`]; what waits for its sum is kept here. In the rank's last
//! backward the hooks complete the sums, and the buckets reduce them, in the same tree.

mod check;
pub(crate) mod own;
mod running;
