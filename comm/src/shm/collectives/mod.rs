//! Collectives in which each rank reads what it needs from the others: one a file, with what each
//! rank contributes, who reads it, and what is done with it. The loop is in `read`.

pub mod all_gather;
pub mod all_to_all;
pub mod barrier;
pub mod broadcast;
pub mod gather;
pub mod read;
pub mod reduce_scatter;
pub mod scatter;
