//! What README and docs/ say of files and environment variables is so, in sentences that are not long.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use flow_harness::root;

/// All files below `folder` whose names end so.
fn files(folder: &Path, ends: &[&str]) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .flat_map(|path| if path.is_dir() { files(&path, ends) } else { vec![path] })
        .filter(|path| ends.iter().any(|end| path.to_string_lossy().ends_with(end)))
        .collect()
}

/// The names in quotes that begin with `FLOW_`.
fn variables(text: &str) -> impl Iterator<Item = &str> {
    text.split("\"FLOW_").skip(1).filter_map(|rest| {
        let (name, _) = rest.split_once('"')?;
        let is_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
        (!name.is_empty() && name.chars().all(is_name)).then_some(name)
    })
}

#[test]
fn the_page_of_variables_has_all_that_the_code_reads_and_no_other() {
    let mut read = BTreeSet::new();
    for entry in fs::read_dir(root()).unwrap() {
        let package = entry.unwrap().path();
        // Those that users depend on; examples, tests and scripts have their own.
        if ["examples", "tests", "scripts"].iter().any(|name| package.ends_with(name)) {
            continue;
        }
        let is_python = ["python", "pytorch"].iter().any(|name| package.ends_with(name));
        let folder = if is_python { package } else { package.join("src") };
        for file in files(&folder, &[".rs", ".cpp", ".py"]) {
            if file.starts_with(folder.join("tests")) {
                continue;
            }
            let text = fs::read_to_string(&file).unwrap();
            read.extend(variables(&text).map(|name| format!("FLOW_{name}")));
        }
    }
    let wheel = fs::read_to_string(root().join("setup.py")).unwrap();
    read.extend(variables(&wheel).map(|name| format!("FLOW_{name}")));
    assert!(read.contains("FLOW_TIMEOUT"), "{read:?}");
    let page = fs::read_to_string(root().join("docs/environment.md")).unwrap();
    let row = |line: &str| Some(line.strip_prefix("| `")?.split_once('`')?.0.to_owned());
    let listed: BTreeSet<String> = page.lines().filter_map(row).collect();
    let missing: Vec<_> = read.difference(&listed).collect();
    let gone: Vec<_> = listed.difference(&read).collect();
    assert!(
        missing.is_empty() && gone.is_empty(),
        "docs/environment.md lacks {missing:?}, and has {gone:?}, which no code reads"
    );
}

/// The folders with code.
const FOLDERS: &[&str] = &[
    "autograd", "capi", "comm", "ddp", "examples", "flow", "global", "kernels", "launcher",
    "pipeline", "plan", "python", "pytorch", "scripts", "store", "tensor", "tests",
];

/// All files below them whose names end so, from the root.
fn code(ends: &[&str]) -> Vec<String> {
    let from_root = |file: PathBuf| file.strip_prefix(root()).unwrap().display().to_string();
    let of = |folder: &&str| files(&root().join(folder), ends).into_iter().map(from_root);
    FOLDERS.iter().flat_map(of).collect()
}

/// What stands between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn the_page_says_where_unsafe_is() {
    let page = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let (_, paragraph) = page.split_once("\n`unsafe` is in").expect("a paragraph on unsafe");
    let paragraph = paragraph.split("\n\n").next().unwrap();
    let listed: Vec<&str> = quoted(paragraph).filter(|text| text.contains('/')).collect();
    let starts = ["{", "impl", "fn", "extern"].map(|rest| ["unsafe", rest].join(" "));
    let is_unsafe = |file: &String| {
        let text = fs::read_to_string(root().join(file)).unwrap();
        let mut code = text.lines().filter_map(|line| line.split("//").next());
        code.any(|code| starts.iter().any(|start| code.contains(start)))
    };
    let found: Vec<String> = code(&[".rs"]).into_iter().filter(is_unsafe).collect();
    let missing = found.iter().filter(|file| !listed.iter().any(|place| file.starts_with(place)));
    let gone = listed.iter().filter(|place| !found.iter().any(|file| file.starts_with(**place)));
    let (missing, gone): (Vec<_>, Vec<_>) = (missing.collect(), gone.collect());
    assert!(
        missing.is_empty() && gone.is_empty(),
        "docs/architecture.md lacks {missing:?} in its list of unsafe code, and has {gone:?}, \
         which have none"
    );
}

/// The reading orders name files, from the root or from a folder near their text.
#[test]
fn files_that_the_pages_name_exist() {
    let ends = [".rs", ".py", ".cpp", ".cu", ".h"];
    let code = code(&ends);
    for page in ["docs/architecture.md", "CONTRIBUTING.md"] {
        let text = fs::read_to_string(root().join(page)).unwrap();
        let named: Vec<&str> = quoted(&text)
            .filter(|name| !name.contains(' ') && ends.iter().any(|end| name.ends_with(end)))
            .collect();
        let exists = |name: &str| {
            code.iter().any(|file| file == name || file.ends_with(&format!("/{name}")))
        };
        let missing: Vec<_> = named.iter().filter(|name| !exists(name)).collect();
        assert!(named.len() > 5 && missing.is_empty(), "{page} names {missing:?}");
    }
}

/// Whether a test of this name is in a file with this text, or is the file.
fn is_test(name: &str, file: &str, text: &str) -> bool {
    file.ends_with(&format!("/{name}"))
        || text.contains(&format!("scenario(\"{name}\""))
        || text.contains(&format!("\"{name}\":"))
}

#[test]
fn the_table_of_features_names_their_tests() {
    let page = fs::read_to_string(root().join("docs/from-pytorch.md")).unwrap();
    let (_, table) = page.split_once("\n## Every feature of DistributedDataParallel\n").unwrap();
    let files = code(&[".rs", ".py"]).into_iter().filter(|file| file.contains("tests/"));
    let mut tests = Vec::new();
    for file in files {
        let text = fs::read_to_string(root().join(&file)).unwrap();
        tests.push((file, text));
    }
    let mut wrong = Vec::new();
    let mut count = 0;
    for row in table.lines().filter(|line| line.starts_with("| ")).skip(1) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [_, feature, ours, our_test, torchs, torch_test, _] = cells[..] else {
            panic!("{row} has not five cells");
        };
        for (state, test) in [(ours, our_test), (torchs, torch_test)] {
            count += 1;
            if state.starts_with("yes") && quoted(test).next().is_none() {
                wrong.push(format!("{feature} ({state}) names no test"));
            }
            for name in quoted(test) {
                if !tests.iter().any(|(file, text)| is_test(name, file, text)) {
                    wrong.push(format!("{feature}: there is no test {name}"));
                }
            }
        }
    }
    assert!(count > 40 && wrong.is_empty(), "{count} cells: {wrong:#?}");
}

#[test]
fn links_lead_to_files_and_headings() {
    let mut pages = files(&root().join("docs"), &[".md"]);
    pages.extend(["README.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(|name| root().join(name)));
    let mut broken = Vec::new();
    for page in pages {
        let text = fs::read_to_string(&page).unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if link.starts_with("http") {
                continue;
            }
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => page.clone(),
                file => page.parent().unwrap().join(file),
            };
            let is_there = match heading {
                "" => target.exists(),
                heading => fs::read_to_string(&target)
                    .is_ok_and(|text| text.lines().any(|line| anchor(line) == heading)),
            };
            if !is_there {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

/// What a heading is linked by; nothing for other lines.
fn anchor(line: &str) -> String {
    let Some(heading) = line.strip_prefix('#') else { return String::new() };
    let kept = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// What the crates in these folders depend on, by Cargo.toml, by folder.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let mut dependencies = BTreeMap::new();
    for folder in FOLDERS {
        let Ok(manifest) = fs::read_to_string(root().join(folder).join("Cargo.toml")) else {
            continue; // a Python package
        };
        let (_, section) = manifest.split_once("\n[dependencies]\n").unwrap_or_default();
        let section = section.split("\n[").next().unwrap();
        let names =
            section.lines().filter_map(|line| line.strip_prefix("flow-")?.split(' ').next());
        let folders = names.map(|name| name.replace("train", "flow"));
        dependencies.insert(folder.to_string(), folders.collect());
    }
    dependencies.remove("tests");
    dependencies
}

/// Whether `from` depends on `to`, itself or through others.
fn depends(dependencies: &BTreeMap<String, BTreeSet<String>>, from: &str, to: &str) -> bool {
    dependencies[from].iter().any(|next| next == to || depends(dependencies, next, to))
}

#[test]
fn the_picture_of_the_crates_has_their_dependencies() {
    let page = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let drawn: BTreeSet<(&str, &str)> =
        page.lines().filter_map(|line| line.trim().split_once(" --> ")).collect();
    let dependencies = dependencies();
    let mut missing = Vec::new();
    for (from, direct) in &dependencies {
        for to in direct {
            let is_implied = direct.iter().any(|next| depends(&dependencies, next, to));
            if !is_implied && !drawn.contains(&(from, to)) {
                missing.push(format!("{from} --> {to}"));
            }
        }
    }
    let is_gone = |(from, to): &&(&str, &str)| {
        dependencies.get(*from).is_some_and(|direct| !direct.contains(*to))
    };
    let gone: Vec<_> = drawn.iter().filter(is_gone).collect();
    assert!(
        drawn.len() > 5 && missing.is_empty() && gone.is_empty(),
        "docs/architecture.md lacks {missing:?}, and draws {gone:?}, which no Cargo.toml has"
    );
}

/// The most words of a sentence.
const LONGEST: usize = 25;

/// Whether a line begins an item of a list.
fn is_item(line: &str) -> bool {
    let number = line.trim_start_matches(|c: char| c.is_ascii_digit());
    line.starts_with("- ") || (number.len() < line.len() && number.starts_with(". "))
}

/// A text without the targets of its links, in which each code is a word.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    for (index, part) in text.split('`').enumerate() {
        if index % 2 == 1 {
            plain += &format!("`{}`", part.replace([' ', '\n', '|'], "_"));
            continue;
        }
        let mut parts = part.split("](");
        plain += parts.next().unwrap_or_default();
        plain.extend(parts.filter_map(|rest| rest.split_once(')')).map(|(_, rest)| rest));
    }
    plain
}

/// The paragraphs, items of lists and cells of tables of a page, each with the number of its line.
fn blocks(page: &str) -> Vec<(usize, String)> {
    let mut blocks: Vec<(usize, String)> = Vec::new();
    let mut is_fenced = false;
    let mut goes_on = false;
    for (line, number) in page.lines().zip(1..) {
        let content = line.trim_start();
        let is_fence = content.starts_with("```");
        is_fenced ^= is_fence;
        let is_code = line.starts_with("    ") && !goes_on && !is_item(content);
        let is_other =
            content.is_empty() || content.starts_with('#') || content.starts_with("<!--");
        if is_fence || is_fenced || is_code || is_other {
            goes_on = false;
        } else if content.starts_with('|') {
            blocks.extend(plain(content).split('|').map(|cell| (number, cell.to_owned())));
            goes_on = false;
        } else if let Some((_, text)) = blocks.last_mut().filter(|_| goes_on && !is_item(content)) {
            *text += &format!("\n{content}");
        } else {
            blocks.push((number, content.to_owned()));
            goes_on = true;
        }
    }
    blocks
}

/// The sentences of a block that have too many words: the number of its line, the count, the start.
/// Codes that follow each other are a list of names, and count as one.
fn long_sentences((first, text): (usize, String)) -> Vec<(usize, usize, String)> {
    let mut long = Vec::new();
    let text = plain(&text);
    let mut words = Vec::new();
    let mut count = 0;
    let mut start = first;
    let mut after_code = false;
    for (line, number) in text.lines().zip(first..) {
        for word in line.split_whitespace() {
            let bare = word.trim_matches(|c: char| !c.is_alphanumeric() && c != '`');
            let is_code = bare.starts_with('`') && bare.ends_with('`');
            if words.is_empty() {
                start = number;
            }
            words.push(word);
            let is_listed = is_code && after_code;
            count += usize::from(!bare.is_empty() && !is_listed);
            after_code = is_code;
            if word.trim_end_matches([')', '"', '*']).ends_with(['.', '!', '?', ':']) {
                if count > LONGEST {
                    long.push((start, count, words[..8].join(" ")));
                }
                words.clear();
                count = 0;
                after_code = false;
            }
        }
    }
    if count > LONGEST {
        long.push((start, count, words[..8].join(" ")));
    }
    long
}

#[test]
fn sentences_of_the_pages_are_not_long() {
    let mut pages = files(&root().join("docs"), &[".md"]);
    pages.extend(["README.md", "CONTRIBUTING.md"].map(|name| root().join(name)));
    let mut long = Vec::new();
    let mut count = 0;
    for page in pages {
        let text = fs::read_to_string(&page).unwrap();
        let name = page.strip_prefix(root()).unwrap().display();
        for block in blocks(&text) {
            count += 1;
            for (line, words, start) in long_sentences(block) {
                long.push(format!("{name}:{line}: {words} words, at most {LONGEST}: {start} ..."));
            }
        }
    }
    assert!(count > 2000 && long.is_empty(), "{count} paragraphs, items and cells: {long:#?}");
}

#[test]
fn a_long_sentence_is_found_where_it_begins() {
    let long = "word ".repeat(24);
    let names = "`a`, `b c`, ".repeat(30);
    let page = format!(
        "# {long} {long}\n\n    {long} {long}\n\n```\n{long} {long}\n```\n| {long}x | {long}x |\n\
         - Short. {long}\nx y.\n- {long}: {long}\n- {names}[{long}](target of a link).\n"
    );
    let found: Vec<_> = blocks(&page).into_iter().flat_map(long_sentences).collect();
    let start = "word word word word word word word word".to_owned();
    assert_eq!(found, [(9, 26, start)], "{page}");
}
