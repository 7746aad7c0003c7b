//! How long the planner takes where there are very many layouts, and schedules of 1,024 ranks.

use std::time::Instant;

use flow_plan::schedule::{Schedule, ScheduleKind};
use flow_plan::{Constraints, Task, search};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = include_str!("../models/gpt3-175b.json");
    let cluster = include_str!("../models/dgx-a100.json");
    for (batch, ranks) in [(1_536, 3_072), (20_160, 10_080), (110_880, 10_080)] {
        let mut task = Task::from_json(model, Some(cluster))?;
        task.batch = batch;
        let start = Instant::now();
        let tried = search(&task, ranks, &Constraints::default(), 10)?.tried;
        println!("batch {batch}, {ranks} ranks: {tried} layouts in {:.2?}", start.elapsed());
    }
    for kind in ScheduleKind::ALL {
        let start = Instant::now();
        Schedule::named(kind.name(), 1_024, 2, 2_048)?;
        println!("{kind} of 1024 ranks, 2048 micro-batches: {:.2?}", start.elapsed());
    }
    Ok(())
}
