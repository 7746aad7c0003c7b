//! Boxing: a tensor gets another placement or SBP.

pub mod plan;
