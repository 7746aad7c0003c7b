//! Boxing: what each rank has of a tensor before and after, and what it took. Each rank prints a line of JSON for each.

use flow::prelude::*;
use serde_json::json;

type Rows = Vec<Vec<f64>>;

pub fn run(group: &ProcessGroup) -> anyhow::Result<()> {
    let placement = Placement::new(group, [0, 1])?;
    let factor = if group.rank() == 0 { 1.0 } else { 10.0 };
    let local = Tensor::from_slice2(&[[1.0, 2.0], [3.0, 4.0]]).to(group.device()) * factor;
    let terms = local.to_global(&placement, [P])?;
    let copies = local.to_global(&placement, [B])?;
    for (tensor, from, to) in [
        (&copies, S(0), B),
        (&copies, B, S(0)),
        (&terms, P, B),
        (&terms, P, S(0)),
        (&copies, S(0), S(1)),
        (&copies, S(0), P),
        (&copies, B, P),
    ] {
        let before = tensor.to_sbp([from])?;
        let (after, table) = global::explain(|| before.to_sbp([to]));
        let after = after?;
        if group.rank() > 1 {
            continue; // it is outside of the placement, and has nothing
        }
        let line = json!({
            "rank": group.rank(),
            "from": from.to_string(),
            "to": to.to_string(),
            "before": Rows::try_from(before.to_local()?)?,
            "after": Rows::try_from(after.to_local()?)?,
            "by": table.boxings.keys().collect::<Vec<_>>(),
            "bytes": table.cost.bytes,
        });
        println!("{line}");
    }
    Ok(())
}
