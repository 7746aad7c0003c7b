//! A small GPT: its losses on every layout are those of one rank, and those of PyTorch; and what the
//! layout promises happens.
//!
//! Layouts are tried by ranks that are threads, which takes a fraction of the time of processes.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use clap::Parser;
use flow::prelude::ProcessGroup;
use flow_tests::{Finished, Process, TEST_TIMEOUT, launch, launcher, on_fake_cuda, python};
use serde_json::Value;
use tempfile::{TempDir, tempdir};

#[allow(dead_code)] // main()
#[path = "../../src/bin/gpt/main.rs"]
mod program;

const STEPS: usize = 3;
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

/// The arguments of a training on this layout (dp, tp, pp). What must not depend on the layout is
/// fixed; blocks, heads and samples of a micro-batch can be divided by eight.
fn arguments(folder: &Path, layout: [usize; 3], more: &str) -> Vec<String> {
    let [dp, tp, pp] = layout;
    let file = |name| folder.join(name).display().to_string();
    let words = format!(
        "--layers 8 --width 16 --heads 8 --context 8 --batch-size 16 --micro-batches 2 --steps {STEPS} \
         --lr 0.02 --dropout 0.2 --clip 0.5 --dtype f64 --dp {dp} --tp {tp} --pp {pp} --text {} \
         --losses {} {more}",
        file("text"),
        file("losses")
    );
    words.split_whitespace().map(str::to_owned).collect()
}

fn read_losses(folder: &Path) -> Vec<f64> {
    let text = fs::read_to_string(folder.join("losses")).unwrap();
    text.lines().map(|line| line.parse().unwrap()).collect()
}

/// The losses of a training by threads.
fn losses(folder: &Path, layout: [usize; 3], more: &str) -> Vec<f64> {
    let arguments = arguments(folder, layout, more);
    let arguments = ["gpt".to_owned()].into_iter().chain(arguments);
    let options = &program::Options::try_parse_from(arguments).unwrap();
    let groups = ProcessGroup::in_process(layout.iter().product()).unwrap();
    thread::scope(|scope| {
        for group in groups {
            group.set_timeout(TEST_TIMEOUT);
            scope.spawn(move || {
                let outcome = program::run(options, &group);
                outcome.unwrap_or_else(|error| panic!("rank {}: {error:#}", group.rank()));
            });
        }
    });
    read_losses(folder)
}

/// A job of processes, with the log of what blocks and batches do.
fn processes(folder: &Path, layout: [usize; 3], more: &str) -> Finished {
    let arguments = arguments(folder, layout, more);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut command = launcher(layout.iter().product(), &[], "gpt", &arguments);
    command.env("RUST_LOG", "gpt=debug");
    Process::start(command).finish(TEST_TIMEOUT)
}

fn output(folder: &Path, layout: [usize; 3], more: &str) -> Finished {
    let finished = processes(folder, layout, more);
    assert_eq!(finished.code, Some(0), "{finished:?}");
    finished
}

#[track_caller]
fn assert_same(losses: &[f64], expected: &[f64], what: &str) {
    assert_within(TOLERANCE, losses, expected, what);
}

/// Each loss differs from what is expected by less than this part of it.
#[track_caller]
fn assert_within(tolerance: f64, losses: &[f64], expected: &[f64], what: &str) {
    assert_eq!(losses.len(), expected.len(), "{what}");
    for (step, (loss, expected)) in losses.iter().zip(expected).enumerate() {
        let difference = (loss - expected).abs() / expected;
        assert!(difference < tolerance, "{what}, step {step}: {loss} instead of {expected}");
    }
}

/// All layouts of so many ranks.
fn layouts(ranks: usize) -> Vec<[usize; 3]> {
    let divisors = |of: usize| (1..=of).filter(move |&part| of.is_multiple_of(part));
    let with_tp = |tp: usize| divisors(ranks / tp).map(move |pp| [ranks / tp / pp, tp, pp]);
    divisors(ranks).flat_map(with_tp).collect()
}

/// With dropout, clipping, ZeRO and sequence parallelism; 8 ranks with recomputation as well.
#[test]
fn every_layout_learns_as_one_rank() {
    let folder = folder();
    let expected = losses(folder.path(), [1, 1, 1], "");
    assert_eq!(expected.len(), STEPS);
    assert!(expected[STEPS - 1] < expected[0] - 0.1, "it does not learn: {expected:?}");
    for without in ["--dropout 0", "--clip 1e9"] {
        let other = losses(folder.path(), [1, 1, 1], without);
        let difference = (other[STEPS - 1] - expected[STEPS - 1]).abs();
        assert!(difference > 1e-6, "{without} changes nothing: {other:?}");
    }
    let layouts = [2, 4, 8].map(layouts).concat();
    assert_eq!(layouts.len(), 3 + 6 + 10);
    for layout in layouts {
        let more = if layout.iter().product::<usize>() == 8 { "--recompute" } else { "" };
        let losses = losses(folder.path(), layout, more);
        assert_same(&losses, &expected, &format!("{layout:?}"));
    }
}

/// The losses have the same bits as without: also in bf16, and with other schedules.
#[test]
fn ranks_with_parameters_in_common_learn_as_with_their_own() {
    let folder = folder();
    let folder = folder.path();
    for (layout, more) in [
        ([1, 1, 1], ""),
        ([4, 1, 1], ""),
        ([2, 2, 1], ""),
        ([2, 1, 2], "--schedule zb-v --recompute"),
        ([2, 1, 2], "--schedule interleaved --dtype f32"),
        ([2, 2, 2], "--dtype bf16"),
    ] {
        let expected = losses(folder, layout, more);
        let found = losses(folder, layout, &format!("--fsdp {more}"));
        assert_eq!(found, expected, "{layout:?} {more}");
    }
}

#[test]
fn every_schedule_learns_as_one_rank() {
    let folder = folder();
    let expected = losses(folder.path(), [1, 1, 1], "");
    for (layout, schedule) in [
        ([1, 1, 4], "gpipe"),
        ([1, 1, 2], "interleaved --chunks 3"),
        ([1, 2, 2], "interleaved"),
        ([1, 1, 4], "zb-h1 --recompute"),
        ([1, 1, 2], "zb-v"),
        ([2, 1, 2], "zb-v --recompute"),
    ] {
        let losses = losses(folder.path(), layout, &format!("--schedule {schedule}"));
        assert_same(&losses, &expected, &format!("{layout:?} {schedule}"));
    }
}

/// Activations and gradients over NCCL, with tensors on the CPU.
#[test]
fn on_fake_gpus_layouts_learn_as_one_rank() {
    let folder = folder();
    let folder = folder.path();
    let expected = losses(folder, [1, 1, 1], "");
    for (layout, more) in [([1, 1, 2], "--recompute"), ([2, 1, 2], "--schedule zb-v")] {
        let arguments = arguments(folder, layout, &format!("--device cuda {more}"));
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let job = launcher(layout.iter().product(), &[], "gpt", &arguments);
        let Some(mut job) = on_fake_cuda(job) else { return };
        job.env("FLOW_TEST_HOST_AS_GPU", "1");
        Process::start(job).finish(TEST_TIMEOUT).success();
        assert_same(&read_losses(folder), &expected, &format!("{layout:?} {more}"));
    }
}

/// Vocabulary, tokens and blocks that ranks cannot share evenly.
#[test]
fn uneven_sizes_learn_as_one_rank() {
    let folder = folder();
    let sizes = "--width 12 --heads 3 --context 7 --layers 5";
    let expected = losses(folder.path(), [1, 1, 1], sizes);
    for layout in [[1, 3, 1], [1, 3, 2]] {
        assert_same(&losses(folder.path(), layout, sizes), &expected, &format!("{layout:?}"));
    }
    // Stages without blocks.
    let sizes = "--layers 2";
    let expected = losses(folder.path(), [1, 1, 1], sizes);
    assert_same(&losses(folder.path(), [1, 1, 4], sizes), &expected, sizes);
}

/// The number after these words.
fn number_after(text: &str, words: &str) -> i64 {
    let (_, rest) = text.split_once(words).unwrap_or_else(|| panic!("no {words:?} in {text}"));
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

/// In the program's own words: the equal losses do not show it.
#[test]
fn recomputation_sequence_parallelism_and_sharding_happen() {
    let folder = folder();
    let folder = folder.path();
    let checkpoint = format!("--checkpoint {}", folder.join("checkpoint").display());
    let kept = output(folder, [2, 2, 1], &checkpoint);
    let again = output(folder, [2, 2, 1], "--recompute");
    let forwards = |job: &Finished| job.stderr.matches("] block ").count();
    assert_eq!(forwards(&kept), 4 * STEPS * 2 * 8, "ranks, steps, micro-batches, blocks");
    assert_eq!(forwards(&again), 2 * forwards(&kept));
    let memory = |job: &Finished, part: &str| -> f64 {
        let (_, rest) = job.stdout.split_once(&format!("{part} ")).unwrap();
        rest.split([',', '\n']).next().unwrap().parse().unwrap()
    };
    assert!(memory(&again, "activations") < 0.5 * memory(&kept, "activations"), "{kept:?}");
    // Split by samples and by tokens.
    let split = "activations [8, 8, 16] as [S(0), S(1)]\n";
    assert_eq!(kept.stderr.matches(split).count(), forwards(&kept), "{}", kept.stderr);

    let of = |job: &Finished| {
        let elements = |words| number_after(&job.stdout, words);
        (elements("a rank has at most "), elements("the optimizer's state of "))
    };
    let (parameters, state) = of(&output(folder, [1, 2, 1], "--stop-after 0"));
    assert_eq!(state, parameters);
    // The stages are the planner's: three blocks and the embedding, two and the head.
    let (parameters, _) = of(&output(folder, [1, 1, 2], "--layers 5 --stop-after 0"));
    assert_eq!(parameters, 3 * (12 * 16 * 16 + 13 * 16) + (256 + 8) * 16);
    // Half of it, but for biases that are split already.
    let (parameters, state) = of(&kept);
    assert!(state < parameters * 53 / 100, "{state} of {parameters}");
    // In double precision; AdamW has shards and two means.
    for (part, elements) in
        [("weights", parameters), ("gradients", parameters), ("optimizer", 3 * state)]
    {
        let megabytes = 8.0 * elements as f64 / 1e6;
        assert!((memory(&kept, part) - megabytes).abs() < 1e-3, "{part}: {megabytes}, {kept:?}");
    }
    // The ranks have saved all of it, and none more than it has.
    let path = folder.join(format!("checkpoint/step-{STEPS}"));
    for rank in 0..4 {
        assert!(path.join(format!("rank-{rank:05}.safetensors")).is_file(), "{rank}");
    }
    let index: Value = serde_json::from_slice(&fs::read(path.join("index.json")).unwrap()).unwrap();
    let elements = |what: &Value| -> i64 {
        what["shape"].as_array().unwrap().iter().map(|size| size.as_i64().unwrap()).product()
    };
    for name in ["exp_avg", "exp_avg_sq"] {
        let ends = format!(".{name}");
        let tensors = index["index"]["tensors"].as_object().unwrap().iter();
        let mut saved = [0; 4];
        for (name, tensor) in tensors.filter(|(name, _)| name.ends_with(&ends)) {
            let shards = tensor["shards"].as_array().unwrap();
            assert_eq!(shards.iter().map(elements).sum::<i64>(), elements(tensor), "{name}");
            for shard in shards {
                saved[shard["rank"].as_u64().unwrap() as usize] += elements(shard);
            }
        }
        assert!(saved.iter().all(|saved| (state / 2..=state).contains(saved)), "{saved:?}");
    }
}

/// The same weights and the same samples, with `torch.nn` and PyTorch's own AdamW, clipping and
/// schedule of the learning rate: losses, gradients (of which AdamW keeps the mean) and weights.
#[test]
fn training_is_that_of_pytorch() {
    if !python::have("torch") {
        return;
    }
    let folder = folder();
    let folder = folder.path();
    let checkpoint = folder.join("checkpoint");
    let more = format!("--dropout 0 --checkpoint {}", checkpoint.display());
    output(folder, [1, 1, 1], &format!("{more} --stop-after 0"));
    let job = output(folder, [1, 1, 1], &more);
    let places = job.stderr.lines().filter_map(|line| line.split_once(": samples from "));
    let places: Vec<&str> = places.map(|(_, places)| places).collect();
    assert_eq!(places.len(), STEPS, "{}", job.stderr);
    let mut command = Command::new(python::python());
    command
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/gpt/reference.py"))
        .arg(&checkpoint)
        .arg(folder.join("text"))
        .env("PYTHONPATH", python::python_path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut torch = command.spawn().unwrap();
    torch.stdin.take().unwrap().write_all(places.join("\n").as_bytes()).unwrap();
    let printed = torch.wait_with_output().unwrap();
    assert!(printed.status.success(), "{}", printed.status);
    let found: Value = serde_json::from_slice(&printed.stdout).unwrap();
    let expected: Vec<f64> = serde_json::from_value(found["losses"].clone()).unwrap();
    assert_same(&read_losses(folder), &expected, "PyTorch");
    for (what, tolerance) in [("gradients", 1e-12), ("weights", 1e-10)] {
        let difference = found[what].as_f64().unwrap();
        assert!(difference < tolerance, "{what} differ by {difference}");
    }
}

/// One step on four ranks, one on two ranks, the rest on one; then samples of it.
#[test]
fn a_checkpoint_goes_on_under_other_layouts() {
    let folder = folder();
    let folder = folder.path();
    let expected = losses(folder, [1, 1, 1], "");
    let checkpoint = format!("--checkpoint {}", folder.join("checkpoint").display());
    let until = |layout, last: &str| losses(folder, layout, &format!("{checkpoint} {last}"));
    let zb_v = "--stop-after 1 --schedule zb-v";
    assert_same(&until([1, 2, 2], zb_v), &expected[..1], "the first step");
    assert_same(&until([2, 1, 1], "--stop-after 2"), &expected[..2], "the next one");
    assert_same(&until([1, 1, 1], ""), &expected, "the rest");

    let sample = |layout, more: &str| {
        output(folder, layout, &format!("{checkpoint} --sample small --sample-bytes 12 {more}"))
            .stdout
    };
    let text = sample([1, 1, 1], "");
    assert!(text.starts_with("small") && text.len() > "small".len() + 12, "{text}");
    for (layout, schedule) in [([1, 2, 1], "1f1b"), ([1, 2, 2], "interleaved"), ([2, 1, 2], "zb-v")]
    {
        assert_eq!(sample(layout, &format!("--schedule {schedule}")), text, "{layout:?}");
    }
    let fails = |more: &str, expected: &str| fails(folder, &format!("--sample a {more}"), expected);
    fails(
        &format!("{checkpoint} --heads 4"),
        "the checkpoint was made with --heads 8, not 4; use that, or another folder",
    );
    let nowhere = folder.join("nowhere").display().to_string();
    fails(
        &format!("--checkpoint {nowhere}"),
        &format!("there is no folder {nowhere} of checkpoints"),
    );
    assert!(!Path::new(&nowhere).exists());
}

/// With the learning rates of the longer training from the first step on it is that training.
#[test]
fn a_training_goes_on_for_more_steps() {
    let folder = folder();
    let folder = folder.path();
    let run = |checkpoint: &str, more: &str| {
        let checkpoint = folder.join(checkpoint);
        losses(folder, [1, 1, 1], &format!("--checkpoint {} {more}", checkpoint.display()))
    };
    let longer = losses(folder, [1, 1, 1], "--steps 5");
    assert_same(&run("planned", "--lr-decay-steps 5"), &longer[..STEPS], "the first steps");
    assert_same(&run("planned", "--steps 5"), &longer, "all steps");
    // Else the rates change from there on, or stay at the lowest.
    let first = run("renewed", "");
    assert_eq!(run("stays", ""), first);
    let stays = run("stays", &format!("--steps 5 --lr-decay-steps {STEPS}"));
    let checkpoint = format!("--checkpoint {}", folder.join("renewed").display());
    let said = output(folder, [1, 1, 1], &format!("{checkpoint} --steps 5")).stdout;
    let renewed = read_losses(folder);
    for losses in [&stays, &renewed] {
        assert_eq!((losses.len(), &losses[..STEPS]), (5, &first[..]));
    }
    // The first loss after that has the same weights.
    assert_eq!(stays[STEPS], renewed[STEPS]);
    assert_ne!(stays[STEPS + 1], renewed[STEPS + 1]);
    let expected = format!(
        "the learning rate now falls until step 5, not {STEPS} as before: --lr-decay-steps {STEPS} \
         keeps that\n"
    );
    assert!(said.contains(&expected), "{said}");
}

/// Rounding changes a number by up to this part of it, here at random: so the losses, means over
/// many such numbers, differ by less. Also those of a training that goes on under another layout.
#[test]
fn other_precisions_learn_as_double_does() {
    let folder = folder();
    let folder = folder.path();
    let double = losses(folder, [1, 1, 1], "");
    let assert_near = |dtype: &str, rounding: f64, layout, more: &str| {
        let found = losses(folder, layout, &format!("--dtype {dtype} {more}"));
        assert_within(rounding, &found, &double[..found.len()], &format!("{dtype} {layout:?}"));
        assert_ne!(found, double, "{dtype} {layout:?}");
        found.len()
    };
    let bf16 = |layout, more: &str| assert_near("bf16", 1.0 / 512.0, layout, more);
    for layout in [[2, 1, 1], [1, 2, 2], [2, 2, 2]] {
        bf16(layout, "");
    }
    let checkpoint = format!("--checkpoint {}", folder.join("checkpoint").display());
    assert_eq!(bf16([1, 2, 2], &format!("{checkpoint} --stop-after 1")), 1);
    assert_eq!(bf16([2, 1, 1], &checkpoint), STEPS);
    assert_near("f32", 1e-6, [2, 2, 2], "");
}

/// What is held out is not trained on, and its loss is that of one rank.
#[test]
fn the_end_of_the_text_validates() {
    let folder = folder();
    let folder = folder.path();
    let said = |layout| {
        let job = output(folder, layout, "--validate-every 2");
        let lines = job.stdout.lines().filter(|line| line.contains("validation loss"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let expected = said([1, 1, 1]);
    assert_eq!(expected.len(), 2, "after steps 2 and {STEPS}");
    let validated = read_losses(folder);
    assert_eq!(said([2, 2, 2]), expected);
    let text = fs::read(folder.join("text")).unwrap();
    let (trained_on, held_out) = text.split_at(text.len() - text.len() / 20);
    let expected = format!(
        "--validate-every holds out the last {} bytes of the text, and a batch is 16 of 200 bytes: \
         give a longer text",
        held_out.len()
    );
    fails(folder, "--validate-every 1 --context 200", &expected);
    fs::write(folder.join("text"), trained_on).unwrap();
    assert_eq!(losses(folder, [1, 1, 1], ""), validated);
}

#[track_caller]
fn fails(folder: &Path, more: &str, expected: &str) {
    let finished = processes(folder, [1, 1, 1], more);
    assert_eq!(finished.code, Some(1), "{finished:?}");
    let said = finished.stderr.lines().any(|line| line == format!("gpt: {expected}"));
    assert!(said, "{finished:?}");
}

#[test]
fn what_does_not_fit_is_one_line() {
    let folder = folder();
    let fails = |more: &str, expected: &str| fails(folder.path(), more, expected);
    fails("--tp 2", "--dp 1 --tp 2 --pp 1 are 2 ranks, and there are 1");
    fails("--heads 3", "--heads 3 does not divide --width 16");
    fails("--micro-batches 3", "--micro-batches 3 does not divide --batch-size 16");
    fails(
        "--text nowhere",
        "cannot read nowhere; get a text by `scripts/setup --data`, or \
        name one by --text: No such file or directory (os error 2)",
    );
    let bytes = fs::metadata(folder.path().join("text")).unwrap().len();
    let expected =
        format!("the text has {bytes} bytes to train on: it needs more than --context 9000");
    fails("--context 9000", &expected);
    for (layout, more, expected) in [
        ([3, 1, 1], "", "--dp 3 does not divide the 8 samples of a micro-batch"),
        ([1, 3, 1], "", "--tp 3 does not divide --heads 8"),
        ([1, 2, 1], "--context 1", "--tp 2 needs as large a --context, and it is 1"),
        (
            [1, 1, 2],
            "--layers 1 --schedule zb-v",
            "4 stages are more than embedding, --layers 1 and head",
        ),
    ] {
        let finished = processes(folder.path(), layout, more);
        assert_eq!(finished.code, Some(1), "{finished:?}");
        assert!(finished.stderr.contains(&format!("gpt: {expected}")), "{finished:?}");
    }
}

/// The whole command, as docs/gpt.md has it, in processes.
#[test]
fn eight_processes_train() {
    let folder = folder();
    let expected = losses(folder.path(), [1, 1, 1], "");
    let arguments = arguments(folder.path(), [2, 2, 2], "");
    launch(8, "gpt", &arguments.iter().map(String::as_str).collect::<Vec<_>>());
    assert_same(&read_losses(folder.path()), &expected, "processes");
}
