//! What the others learn when a rank dies, leaves, hangs, or does something else; and that nothing
//! is left behind. A rank prints the kind and the text of the error that it gets, then those of the
//! next call.

mod departed;
mod disagreements;
mod endless;
mod joining;
mod launched;
mod lost;
mod messages;
mod report;
mod timeouts;
mod unused;

use crate::registry::File;

pub const FILES: [File; 8] = [
    ("failures::departed", departed::SCENARIOS),
    ("failures::disagreements", disagreements::SCENARIOS),
    ("failures::joining", joining::SCENARIOS),
    ("failures::launched", launched::SCENARIOS),
    ("failures::lost", lost::SCENARIOS),
    ("failures::messages", messages::SCENARIOS),
    ("failures::timeouts", timeouts::SCENARIOS),
    ("failures::unused", unused::SCENARIOS),
];
