//! The checkpoint of another training is refused.

use std::fs;
use std::io::Write;

use flate2::write::GzEncoder;
use flate2::Compression;

use crate::common::write_noise;
use crate::job::{error, run, Folder};

#[test]
fn the_checkpoint_of_another_training_is_an_error_that_says_what_differs() {
    let folder = Folder::new();
    run(1, &folder.job(&["--epochs", "1"]));
    let with = "the checkpoint was made with";
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
            "cannot resume: the state was saved with seed 0, this sampler has seed 7".to_owned(),
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
    let difference =
        "cannot resume: the state was saved with samples 600, this sampler has samples 500";
    assert_eq!(error(&folder.job(&["--epochs", "1"])), format!("mnist: {difference}\n"));

    for step in folder.steps() {
        let mut file =
            GzEncoder::new(fs::File::create(folder.checkpoint(step)).unwrap(), Compression::none());
        file.write_all(b"{}\n").unwrap();
        file.finish().unwrap();
    }
    let text = error(&folder.job(&["--epochs", "1"]));
    let foreign =
        format!("mnist: the checkpoint in {} is of another program: ", folder.path("checkpoint"));
    assert!(text.starts_with(&foreign) && text.lines().count() == 1, "{text}");
}
