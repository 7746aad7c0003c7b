//! The Python programs of docs/from-others.md train one model: with the libraries that the page is
//! about, as far as these are here, and with Flow.

use std::fs;

use flow_harness::python::have;
use flow_harness::root;

use crate::several::Several;
use crate::{Part, is_skipped};

/// A program of a section of the page, before the change and after it.
struct Change {
    section: String,
    before: String,
    after: String,
}

/// One for each section that has a Python program: a diff, or a program that stays as it is.
fn changes() -> Vec<Change> {
    let page = fs::read_to_string(root().join("docs/from-others.md")).unwrap();
    page.split("\n## ").skip(1).filter_map(change).collect()
}

fn change(section: &str) -> Option<Change> {
    let mut blocks = section.split("```").skip(1).step_by(2);
    let program = blocks.find(|block| block.contains("import torch\n"))?;
    let (language, text) = program.split_once('\n')?;
    let section = section.lines().next()?.to_owned();
    if language == "diff" {
        return Some(Change { section, before: side(text, '-'), after: side(text, '+') });
    }
    Some(Change { section, before: text.to_owned(), after: text.to_owned() })
}

/// The lines of a diff that have this sign or none.
fn side(diff: &str, sign: char) -> String {
    let mut side = String::new();
    for line in diff.lines().filter(|line| line.is_empty() || line.starts_with([' ', sign])) {
        side += line.get(1..).unwrap_or_default();
        side.push('\n');
    }
    side
}

#[test]
fn programs_of_other_libraries_train_as_before() {
    if is_skipped() {
        return;
    }
    let changes = changes();
    let named: Vec<&str> = changes.iter().map(|change| &change.section[..]).collect();
    assert_eq!(named, ["torchrun", "accelerate", "DeepSpeed", "Horovod"]);
    let mut programs = vec![("over gloo", &changes[0].before)];
    for change in &changes {
        if change.section != "accelerate" || have("accelerate") {
            programs.push((&change.section, &change.after));
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let libraries = root().join(".python-libraries");
    let mut several = Several::new();
    for (name, program) in &programs {
        let file = folder.path().join(format!("train {name}.py"));
        fs::write(&file, format!("import sys\nsys.path.append({libraries:?})\n{program}")).unwrap();
        several.add(Part::Cpp, &[("GLOO_SOCKET_IFNAME", "lo")], file.to_str().unwrap(), &[]);
    }
    let printed = several.launched(2);
    let results: Vec<_> = printed.iter().map(|finished| results(&finished.stdout)).collect();
    let [first, second] = &results[0][..] else { panic!("{printed:?}") };
    assert_eq!(first.replace("rank 0: 0.", "rank 1: 0."), *second);
    for ((name, _), result) in programs.iter().zip(&results) {
        assert_eq!(*result, results[0], "{name}: {printed:?}");
    }
}

/// The lines of ranks; libraries print warnings beside them.
fn results(printed: &str) -> Vec<&str> {
    printed.lines().filter(|line| line.starts_with("rank ")).collect()
}
