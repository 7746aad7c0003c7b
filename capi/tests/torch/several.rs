//! Programs that share a job, in which PyTorch is imported once: `several.py`.

use flow_harness::Finished;
use flow_harness::cli::{launcher, run};
use flow_harness::python::python;
use tempfile::TempDir;

use crate::{Part, script, variables, with_flow};

/// Programs of `pytorch/tests` that run in turn in the same processes' children.
pub struct Several {
    folder: TempDir,
    words: Vec<String>,
    count: usize,
}

impl Several {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let words = vec![script("several.py"), folder.path().display().to_string()];
        Self { folder, words, count: 0 }
    }

    /// One more, with these variables and arguments.
    pub fn add(&mut self, part: Part, own: &[(&str, &str)], name: &str, arguments: &[&str]) {
        if self.count > 0 {
            self.words.push("--".into());
        }
        let own = own.iter().map(|(name, value)| format!("{name}={value}"));
        self.words.extend(words_of(part).into_iter().chain(own).chain([name.into()]));
        self.words.extend(arguments.iter().map(|&argument| argument.to_owned()));
        self.count += 1;
    }

    /// The script that runs them, and its arguments.
    pub fn words(&self) -> &[String] {
        &self.words
    }

    /// That a job of so many ranks, or one of its processes, has succeeded.
    pub fn is_good(&self, ranks: usize, job: Finished) {
        assert_eq!(job.code, Some(0), "{job:?}{:?}", self.printed(ranks));
    }

    /// What each has printed on so many ranks that have ended well.
    pub fn printed(&self, ranks: usize) -> Vec<Finished> {
        (0..self.count).map(|number| self.of(number, ranks)).collect()
    }

    fn of(&self, number: usize, ranks: usize) -> Finished {
        // A program that has not begun has written nothing.
        let text = |rank, name| {
            let path = self.folder.path().join(format!("{number}.{rank}.{name}"));
            std::fs::read_to_string(path).unwrap_or_default()
        };
        let all = |name| (0..ranks).map(|rank| text(rank, name)).collect();
        Finished { pid: 0, code: Some(0), signal: None, stdout: all("out"), stderr: all("err") }
    }

    /// What each has printed on so many ranks under flow-launch.
    pub fn launched(&self, ranks: usize) -> Vec<Finished> {
        let (python, count) = (python(), ranks.to_string());
        let mut job = launcher(&["--nproc-per-node", &count, "--no-python", &python]);
        self.is_good(ranks, run(with_flow(job.args(&self.words))));
        self.printed(ranks)
    }
}

/// The variables of a program that gets this part, as words.
pub fn words_of(part: Part) -> Vec<String> {
    let variables = variables(part).into_iter();
    variables.map(|(name, value)| format!("{name}={}", value.display())).collect()
}
