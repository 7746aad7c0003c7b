//! Rules: with which SBPs of its inputs an operation may run on the locals, and what its results
//! are then. One file a family of operations.
//!
//! Every operation may also run with all tensors B.

mod attention;
mod convolution;
mod creation;
mod indexing;
pub mod infer;
mod kinds;
mod losses;
mod matmul;
mod normalization;
pub mod op;
mod pointwise;
mod reductions;
pub mod sizes;
mod views;

use std::collections::HashMap;
use std::sync::OnceLock;

use op::Rule;

const FAMILIES: &[&[Rule]] = &[
    attention::RULES,
    convolution::RULES,
    creation::RULES,
    indexing::RULES,
    losses::RULES,
    matmul::RULES,
    normalization::RULES,
    pointwise::RULES,
    reductions::RULES,
    views::RULES,
];

/// Returns whether an operation runs where some ranks have nothing of its tensors: it is on each
/// element by itself, or only moves elements.
pub fn bears_empty(name: &str) -> bool {
    has_name(pointwise::RULES, name) || has_name(views::RULES, name)
}

/// Returns whether libtorch reads the memory of some inputs as if they had no gaps: statistics,
/// which its own forward has made.
pub fn reads_without_gaps(name: &str) -> bool {
    has_name(normalization::RULES, name)
}

fn has_name(rules: &[Rule], name: &str) -> bool {
    rules.iter().any(|rule| rule.names.contains(&name))
}

/// Returns the rule of an operation, if there is one.
pub fn rule(name: &str) -> Option<&'static Rule> {
    static RULES: OnceLock<HashMap<&str, &Rule>> = OnceLock::new();
    let rules = RULES.get_or_init(|| {
        let mut by_name = HashMap::new();
        for rule in FAMILIES.iter().copied().flatten() {
            by_name.extend(rule.names.iter().map(|&name| (name, rule)));
        }
        by_name
    });
    rules.get(name).copied()
}

/// Returns the names of all operations that have a rule, family by family.
pub fn names() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().flat_map(|rules| rules.iter()).flat_map(|rule| rule.names).copied()
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::op::{Arg, Input, Op};
    use super::*;

    #[test]
    fn an_operation_has_one_rule() {
        let rules = || FAMILIES.iter().flat_map(|rules| rules.iter());
        let mut names: Vec<_> = rules().flat_map(|rule| rule.names).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(count >= 200, "{count}");
        assert!(rule("mm").is_some() && rule("no_such_operation").is_none());
    }

    /// Whatever an operation's arguments are, a rule does not panic, and fits the number of tensors.
    #[test]
    fn rules_bear_any_arguments() {
        let shapes: [&[usize]; 5] = [&[], &[0], &[3], &[4, 6], &[2, 3, 4, 5]];
        let ints = [-1, 2, 0];
        let names = FAMILIES.iter().flat_map(|rules| rules.iter()).flat_map(|rule| rule.names);
        for name in names {
            for shape in shapes {
                for count in 0..8 {
                    for arg in [
                        Arg::None,
                        Arg::Int(-1),
                        Arg::Bool(true),
                        Arg::Ints(ints[..].into()),
                        Arg::Tensor(1),
                    ] {
                        let args = [vec![Arg::Tensor(0)], vec![arg; count]].concat();
                        let inputs = vec![Input::new(shape, Kind::Float); 7];
                        let mut op = Op::new(name, "", args, inputs, 3, false);
                        op.ranks = 2;
                        let rule = rule(name).unwrap();
                        drop((rule.signatures)(&op));
                    }
                }
            }
        }
    }
}
