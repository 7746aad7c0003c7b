//! A small GPT through the real launcher: its losses on every layout are those of one rank.

use std::fs;
use std::path::Path;

use flow_tests::{launch, launcher, Process, TEST_TIMEOUT};
use tempfile::{tempdir, TempDir};

const STEPS: usize = 5;
/// In double precision. Sums have another order on each layout.
const TOLERANCE: f64 = 1e-11;

/// Has a text.
fn folder() -> TempDir {
    let folder = tempdir().unwrap();
    let words = ["a", "small", "text", "that", "no", "model", "will", "ever", "need", "\n"];
    let text: Vec<&str> = (0..900).map(|at| words[at * at % 97 % words.len()]).collect();
    fs::write(folder.path().join("text"), text.join(" ")).unwrap();
    folder
}

/// The arguments of a training with all that must not depend on the layout. Blocks and heads can be
/// divided by four, samples of a micro-batch by eight.
fn arguments<'a>(text: &'a str, losses: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let sizes = "--layers 4 --width 16 --heads 4 --context 8 --batch-size 16 --micro-batches 2";
    let training = "--steps 5 --lr 0.02 --dropout 0.2 --clip 0.5 --dtype f64";
    let fixed = sizes.split(' ').chain(training.split(' '));
    fixed.chain(["--text", text, "--losses", losses]).chain(more.iter().copied()).collect()
}

/// The losses of a training by so many data, tensor and pipeline parallel ranks.
fn losses(folder: &Path, [dp, tp, pp]: [usize; 3], more: &[&str]) -> Vec<f64> {
    let [text, file] = ["text", "losses"].map(|name| folder.join(name).display().to_string());
    let [of_dp, of_tp, of_pp] = [dp, tp, pp].map(|ranks| ranks.to_string());
    let layout = [["--dp", &of_dp], ["--tp", &of_tp], ["--pp", &of_pp]].concat();
    launch(dp * tp * pp, "gpt", &arguments(&text, &file, &[&layout[..], more].concat()));
    fs::read_to_string(file).unwrap().lines().map(|line| line.parse().unwrap()).collect()
}

#[track_caller]
fn assert_same(losses: &[f64], expected: &[f64], what: &str) {
    assert_eq!(losses.len(), expected.len(), "{what}");
    for (step, (loss, expected)) in losses.iter().zip(expected).enumerate() {
        let difference = (loss - expected).abs() / expected;
        assert!(difference < TOLERANCE, "{what}, step {step}: {loss} instead of {expected}");
    }
}

/// With dropout, clipping, ZeRO and sequence parallelism; 8 ranks with recomputation as well.
/// `LAYOUTS=all` tries all layouts of 2, 4 and 8 ranks with axes of up to four.
#[test]
fn every_layout_learns_as_one_rank() {
    let folder = folder();
    let expected = losses(folder.path(), [1, 1, 1], &[]);
    assert_eq!(expected.len(), STEPS);
    assert!(expected[STEPS - 1] < expected[0] - 0.1, "it does not learn: {expected:?}");
    for without in [["--dropout", "0"], ["--clip", "1e9"]] {
        let other = losses(folder.path(), [1, 1, 1], &without);
        let difference = (other[STEPS - 1] - expected[STEPS - 1]).abs();
        assert!(difference > 1e-6, "{without:?} changes nothing: {other:?}");
    }
    let layouts = match std::env::var("LAYOUTS").as_deref() {
        Ok("all") => [2, 4, 8].map(layouts).concat(),
        _ => vec![[2, 1, 1], [1, 2, 1], [1, 1, 2], [2, 2, 1], [1, 2, 2], [2, 2, 2]],
    };
    for [dp, tp, pp] in layouts {
        let more: &[&str] = if dp * tp * pp == 8 { &["--recompute"] } else { &[] };
        let losses = losses(folder.path(), [dp, tp, pp], more);
        assert_same(&losses, &expected, &format!("--dp {dp} --tp {tp} --pp {pp}"));
    }
}

/// Those with this product, of axes of up to four ranks.
fn layouts(ranks: usize) -> Vec<[usize; 3]> {
    let sizes = [1, 2, 4];
    let pairs = sizes.iter().flat_map(|&tp| sizes.map(|pp| [tp, pp]));
    let fits = pairs.filter(|&[tp, pp]| ranks.is_multiple_of(tp * pp));
    fits.map(|[tp, pp]| [ranks / tp / pp, tp, pp]).collect()
}

/// Two steps on four ranks, two on two ranks, the rest on one.
#[test]
fn a_checkpoint_goes_on_under_other_layouts() {
    let folder = folder();
    let expected = losses(folder.path(), [1, 1, 1], &[]);
    let checkpoint = folder.path().join("checkpoint").display().to_string();
    let until = |layout, last| {
        losses(folder.path(), layout, &["--checkpoint", &checkpoint, "--stop-after", last])
    };
    assert_same(&until([1, 2, 2], "2"), &expected[..2], "the first two steps");
    assert_same(&until([2, 1, 1], "4"), &expected[..4], "the next two");
    assert_same(&until([1, 1, 1], "5"), &expected, "the rest");
    let [text, file] =
        ["text", "losses"].map(|name| folder.path().join(name).display().to_string());
    let more = ["--checkpoint", &checkpoint, "--sample", "a small", "--sample-bytes", "5"];
    let output = launch(2, "gpt", &arguments(&text, &file, &[&more[..], &["--tp", "2"]].concat()));
    assert!(output.starts_with("a small") && output.len() >= "a small".len() + 6, "{output}");
}

/// Weights in half precision learn too.
#[test]
fn half_precision_learns_as_double_does() {
    let folder = folder();
    let [double, half] = [["--dtype", "f64"], ["--dtype", "bf16"]]
        .map(|dtype| losses(folder.path(), [2, 1, 1], &dtype));
    for (half, double) in half.iter().zip(&double) {
        assert!((half - double).abs() < 0.05, "{half} instead of {double}");
    }
}

#[test]
fn what_does_not_fit_is_one_line() {
    let folder = folder();
    let [text, file] =
        ["text", "losses"].map(|name| folder.path().join(name).display().to_string());
    let fails = |more: &[&str], expected: &str| {
        let command = launcher(1, &[], "gpt", &arguments(&text, &file, more));
        let finished = Process::start(command).finish(TEST_TIMEOUT);
        assert_eq!(finished.code, Some(1), "{}", finished.stderr);
        let said = finished.stderr.lines().any(|line| line == format!("gpt: {expected}"));
        assert!(said, "{}", finished.stderr);
    };
    fails(&["--tp", "2"], "--dp 1 --tp 2 --pp 1 are 2 ranks, and there are 1");
    fails(&["--heads", "3"], "--heads 3 does not divide --width 16");
    fails(&["--pp", "5"], "--pp 5 needs as many --layers, and there are 4");
    fails(
        &["--text", "nowhere"],
        "cannot read nowhere; get a text by `scripts/setup --data`, or \
        name one by --text: No such file or directory (os error 2)",
    );
}
