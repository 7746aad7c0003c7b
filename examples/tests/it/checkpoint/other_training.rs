//! The checkpoint of another training is refused.

use std::fs;

use super::job::{Folder, error, run};
use crate::common::noise::write_noise;

#[test]
fn the_checkpoint_of_another_training_is_an_error_that_says_what_differs() {
    let folder = Folder::new();
    run(1, &folder.job(&["--epochs", "1"]));
    let with = "the checkpoint was made with";
    let saved = folder.checkpoint(60);
    let saved = saved.display();
    let remedy = "; use the settings that it was saved with, or another folder";
    for (option, value, difference) in [
        ("--epochs", "2", format!("{with} --epochs 1, not 2; use that, or another folder")),
        (
            "--batch-size",
            "20",
            format!("{with} --batch-size 10, not 20; use that, or another folder"),
        ),
        ("--lr", "0.5", format!("{with} --lr 0.02, not 0.5; use that, or another folder")),
        ("--steps", "50", format!("{with} --steps all, not 50; use that, or another folder")),
        ("--momentum", "0", format!("{with} --momentum 0.9, not 0; use that, or another folder")),
        (
            "--seed",
            "7",
            format!(
                "{saved}: cannot resume: the state was saved with seed 0, this sampler has seed \
                 7{remedy}"
            ),
        ),
    ] {
        let more = ["--epochs", "1", option, value];
        let more = if option == "--epochs" { &more[2..] } else { &more };
        assert_eq!(error(&folder.job(more)), format!("mnist: {difference}\n"));
    }

    for name in ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"] {
        let file = folder.path(name);
        let bytes = fs::read(&file).unwrap();
        let mut other = bytes.clone();
        *other.last_mut().unwrap() ^= 1;
        fs::write(&file, other).unwrap();
        let text = error(&folder.job(&["--epochs", "1"]));
        let checksums = text.strip_prefix(&format!("mnist: {with} training data of checksum "));
        let checksums =
            checksums.and_then(|rest| rest.strip_suffix("; use that, or another folder\n"));
        let (saved, here) = checksums.and_then(|both| both.split_once(", not ")).expect(&text);
        assert!(
            saved != here && [saved, here].iter().all(|sum| u32::from_str_radix(sum, 16).is_ok()),
            "{text}"
        );
        fs::write(&file, bytes).unwrap();
    }
    run(1, &folder.job(&["--epochs", "1"]));

    write_noise(folder.path("").as_ref(), 500, 20);
    let text = error(&folder.job(&["--epochs", "1"]));
    assert!(text.starts_with(&format!("mnist: {with} training data of checksum ")), "{text}");

    for step in folder.steps() {
        let checkpoint = folder.checkpoint(step);
        fs::write(checkpoint.join("state.json"), "{}\n").unwrap();
        fs::remove_file(checkpoint.join("sums.json")).unwrap();
    }
    let text = error(&folder.job(&["--epochs", "1"]));
    let foreign = format!("mnist: {saved} is of another program: ");
    assert!(text.starts_with(&foreign) && text.lines().count() == 1, "{text}");
}
