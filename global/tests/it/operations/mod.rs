//! Operations on global tensors: whatever the SBPs of an operation's inputs are, its results and
//! their gradients are those of plain tensors.

mod cases;
mod examples;
mod runner;

use std::collections::BTreeSet;

use self::cases::case::{Case, difference};
use self::cases::cases;
use self::runner::{Place, Ranks};
use flow_global::Placement;
use tch::Kind;

/// Rules of operations that run on no CPU, or that no function of tch reaches.
const NOT_HERE: &[(&str, &str)] = &[
    ("_scaled_dot_product_cudnn_attention", "CUDA only"),
    ("_scaled_dot_product_cudnn_attention_backward", "CUDA only"),
    ("_scaled_dot_product_efficient_attention", "CUDA only"),
    ("_scaled_dot_product_efficient_attention_backward", "CUDA only"),
    ("_scaled_dot_product_flash_attention", "CUDA only"),
    ("_scaled_dot_product_flash_attention_backward", "CUDA only"),
    ("cudnn_batch_norm", "CUDA only: cudnn.rs has its code"),
    ("cudnn_batch_norm_backward", "CUDA only: cudnn.rs has its code"),
];

/// Rules of operations that read all of their tensors.
const ALL_B: &[&str] = &["_local_scalar_dense", "allclose", "equal", "is_same_size"];

#[test]
fn every_rule_has_a_case() {
    let cases = cases();
    let covered: BTreeSet<&str> = cases.iter().flat_map(|case| case.covers).copied().collect();
    let allowed: BTreeSet<&str> = NOT_HERE.iter().map(|(name, _)| *name).collect();
    let rules: BTreeSet<&str> = flow_global::rules::names().collect();
    let missing: Vec<_> =
        rules.difference(&covered).filter(|name| !allowed.contains(*name)).collect();
    assert!(missing.is_empty(), "no case covers {missing:?}");
    let unknown: Vec<_> = covered.union(&allowed).filter(|name| !rules.contains(*name)).collect();
    assert!(unknown.is_empty(), "there are no rules {unknown:?}");
    let twice: Vec<_> = covered.intersection(&allowed).collect();
    assert!(twice.is_empty(), "{twice:?} are covered after all");
    let names: BTreeSet<_> = cases.iter().map(|case| &case.name).collect();
    assert_eq!(names.len(), cases.len(), "names of cases are unique");
}

/// The table itself is sound: a case gives the same on contiguous copies of its inputs, what it
/// gives are numbers, and leaves have gradients.
#[test]
fn cases_are_sound() {
    let mut failures = Vec::new();
    for case in cases() {
        let check = || {
            let values = case.values();
            let one = case.plain(&values);
            let copies: Vec<_> = values.iter().map(|value| value.contiguous().copy()).collect();
            let other = case.plain(&copies);
            if one.outputs.is_empty() {
                return Err("no results".to_string());
            }
            for (index, (one, other)) in one.outputs.iter().zip(&other.outputs).enumerate() {
                let is_random = case.draws && one.kind() != Kind::Bool;
                if let Some(difference) =
                    difference(one, other, case.is_single).filter(|_| !is_random)
                {
                    return Err(format!("result {index} {difference}"));
                }
                if one.isnan().any().int64_value(&[]) != 0 {
                    return Err(format!("result {index} is not a number"));
                }
            }
            let both = one.gradients.iter().zip(&other.gradients).zip(&case.inputs);
            for (index, ((one, other), input)) in both.enumerate() {
                match (one, other) {
                    (None, None) if input.is_leaf => {
                        return Err(format!("leaf {index} has no gradient"));
                    }
                    (None, None) => {}
                    (Some(one), Some(other)) => {
                        let is_random = case.draws;
                        if let Some(difference) =
                            difference(one, other, case.is_single).filter(|_| !is_random)
                        {
                            return Err(format!("gradient {index} {difference}"));
                        }
                    }
                    _ => return Err(format!("gradient {index} is there and is not")),
                }
            }
            Ok(())
        };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(check));
        match result {
            Ok(Ok(())) => {}
            Ok(Err(error)) => failures.push(format!("{}: {error}", case.name)),
            Err(_) => failures.push(format!("{}: panicked", case.name)),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Cases reach the rules that they say they cover, and each rule does more than all tensors B.
#[test]
fn on_two_ranks() {
    let cases = cases();
    let place: Place = |group| Placement::new(group, [0, 1]);
    let used = runner::run(&cases, Ranks { size: 2, place, tried: 16 }, true);
    let ran = |case: &Case| used.get(&case.name).cloned().unwrap_or_default();
    let mut wrong = Vec::new();
    for case in cases.iter().filter(|case| used.contains_key(&case.name)) {
        let ran = ran(case);
        let missing = case.covers.iter().filter(|&&name| !ran.contains_key(name));
        wrong.extend(missing.map(|name| format!("{} does not reach {name}", case.name)));
    }
    let is_split = |name: &str| {
        ALL_B.contains(&name) || cases.iter().any(|case| ran(case).get(name) == Some(&true))
    };
    let covered: BTreeSet<&str> = cases.iter().flat_map(|case| case.covers).copied().collect();
    let all_b = covered.iter().filter(|name| !is_split(name) && used.len() == cases.len());
    wrong.extend(all_b.map(|name| format!("{name} runs with all tensors B only")));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn on_a_mesh() {
    let place: Place = |group| Placement::new(group, [[0, 1], [2, 3]]);
    runner::run(&cases(), Ranks { size: 4, place, tried: 10 }, false);
}

/// Sizes of four and five are cut to one, and the second axis cuts nothing.
#[test]
fn on_a_column() {
    let place: Place = |group| Placement::new(group, [[0], [1], [2], [3]]);
    runner::run(&cases(), Ranks { size: 4, place, tried: 8 }, false);
}

/// The first axis cuts nothing.
#[test]
fn on_a_row() {
    let place: Place = |group| Placement::new(group, [[0, 1]]);
    runner::run(&cases(), Ranks { size: 2, place, tried: 8 }, false);
}

/// Sizes of five are cut to one and to nothing.
#[test]
fn on_a_mesh_of_six() {
    let place: Place = |group| Placement::new(group, [[0, 1], [2, 3], [4, 5]]);
    runner::run(&cases(), Ranks { size: 6, place, tried: 5 }, false);
}

/// Sizes of five are split into two, two and one. Rank 1 has nothing of the tensors, and the order is
/// another one than that of the ranks.
#[test]
fn on_three_of_four_ranks() {
    let place: Place = |group| Placement::new(group, [2, 0, 3]);
    runner::run(&cases(), Ranks { size: 4, place, tried: 10 }, false);
}
