//! What docs/pipelines.md shows of schedules is so.

use flow_plan::schedule::{Costs, Schedule, ScheduleKind, picture, simulate, table};

const PAGE: &str = include_str!("../../../docs/pipelines.md");

/// The blocks of text on the page.
fn blocks() -> Vec<&'static str> {
    let blocks = PAGE.split("```text\n").skip(1);
    blocks.map(|rest| rest.split("```").next().unwrap()).collect()
}

#[test]
fn the_pictures_are_those_of_the_schedules() {
    let costs = Costs::default();
    let picture = |name| {
        let schedule = Schedule::named(name, 3, 2, 6).unwrap();
        picture(&simulate(&schedule, &costs).unwrap())
    };
    let names = ScheduleKind::ALL.map(ScheduleKind::name);
    assert_eq!(blocks()[..names.len()], names.map(picture));
    assert_eq!(blocks()[names.len()], table(4, 2, 16, &costs).unwrap());
}

#[test]
fn the_program_is_the_example() {
    assert!(PAGE.contains(include_str!("../../examples/own_schedule.rs")));
}
