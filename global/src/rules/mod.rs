//! Rules: with which SBPs of its inputs an operation may run on the locals, and what its results
//! are then. One file a family of operations.
//!
//! Every operation may also run with all tensors B.

pub mod infer;
mod matmul;
pub mod op;
mod pointwise;

use std::collections::HashMap;
use std::sync::OnceLock;

use op::{Op, Signature};

/// The signatures of some operations, on one axis of a placement.
pub struct Rule {
    /// Of the operations, without `aten::` and the `_` of in-place ones.
    pub names: &'static [&'static str],
    /// The candidates, in the order in which equally cheap ones are taken.
    pub signatures: fn(&Op) -> Vec<Signature>,
}

const FAMILIES: &[&[Rule]] = &[matmul::RULES, pointwise::RULES];

/// The rule of an operation, if there is one.
pub fn rule(name: &str) -> Option<&'static Rule> {
    static RULES: OnceLock<HashMap<&str, &Rule>> = OnceLock::new();
    let all = || FAMILIES.iter().flat_map(|rules| rules.iter());
    let by_name = || all().flat_map(|rule| rule.names.iter().map(move |&name| (name, rule)));
    RULES.get_or_init(|| by_name().collect()).get(name).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_has_one_rule() {
        let rules = || FAMILIES.iter().flat_map(|rules| rules.iter());
        let mut names: Vec<_> = rules().flat_map(|rule| rule.names).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(rule("mm").is_some() && rule("no_such_operation").is_none());
    }
}
