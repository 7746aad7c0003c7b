//! `to_global` makes a global tensor of what the ranks have, and gives it another SBP.

use flow::prelude::*;

use crate::show;

pub fn run(group: &ProcessGroup) -> anyhow::Result<()> {
    let placement = Placement::new(group, [0, 1])?;
    // Rank 0 has 0 to 9, rank 1 has 10 to 19. Ranks outside the placement may pass any tensor.
    let first = group.rank() as i64 * 10;
    let local = Tensor::arange_start(first, first + 10, (Kind::Float, group.device()));
    let local = local.view([2, 5]);
    let split = local.to_global(&placement, [S(0)])?;
    show::all(group, "split", &split)?; // [4, 5]
    let terms = local.to_global(&placement, [P])?;
    show::all(group, "terms", &terms)?; // [2, 5], the sum
    let copies = local.to_global(&placement, [B])?;
    show::all(group, "copies", &copies)?; // [2, 5], what rank 0 has
    // Boxing: the same tensor, lying otherwise.
    show::all(group, "split to broadcast", &split.to_global(&placement, [B])?)?;
    show::all(group, "split to columns", &split.to_global(&placement, [S(1)])?)?;
    show::all(group, "terms to broadcast", &terms.to_global(&placement, [B])?)?;
    show::all(group, "terms to split", &terms.to_global(&placement, [S(0)])?)?;
    show::all(group, "copies to split", &copies.to_global(&placement, [S(1)])?)
}
