//! The training on ranks that come and go has the bits of one that nothing happened to. Jobs that lose
//! ranks at random are those of `scripts/elastic`.

use std::fs;
use std::path::Path;

use flow_tests::{Process, TEST_TIMEOUT, launcher};
use tempfile::tempdir;

/// The weights and the losses of a training of a GPT on the text in `folder`.
fn train(folder: &Path, ranks: usize, more: &[&str]) -> (Vec<u8>, String) {
    let [text, weights, losses] = ["text", "weights.safetensors", "losses"]
        .map(|name| folder.join(name).display().to_string());
    let words = "--model gpt --width 32 --batch-size 2 --checkpoint-every 5";
    let mut arguments: Vec<&str> = words.split_whitespace().collect();
    arguments.extend(["--text", &text, "--save", &weights, "--losses", &losses]);
    arguments.extend(more);
    let command = launcher(ranks, &[], "elastic", &arguments);
    Process::start(command).finish(TEST_TIMEOUT).success();
    (fs::read(weights).unwrap(), fs::read_to_string(losses).unwrap())
}

/// The checkpoint is of step 5 and in the first epoch, of 8 steps. The last step is in the second one.
#[test]
fn a_job_that_starts_again_goes_on_from_its_checkpoint() {
    let folder = tempdir().unwrap();
    let numbers: Vec<String> = (0..1200).map(|number| number.to_string()).collect();
    fs::write(folder.path().join("text"), numbers.concat()).unwrap();
    let undisturbed = train(folder.path(), 2, &["--steps", "12"]);
    let checkpoints = folder.path().join("checkpoints").display().to_string();
    let (_, losses) = train(folder.path(), 3, &["--checkpoint", &checkpoints, "--steps", "7"]);
    assert_eq!(losses.lines().count(), 7);
    assert!(undisturbed.1.starts_with(&losses), "{losses:?}");
    assert!(Path::new(&checkpoints).join("step-5").exists());
    let again = train(folder.path(), 3, &["--checkpoint", &checkpoints, "--steps", "12"]);
    assert!(again == undisturbed, "{} and {}", again.1, undisturbed.1);
    assert_eq!(again.1.lines().count(), 12);
}
