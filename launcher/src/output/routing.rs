//! Routes of workers' streams: the console, a file, or both (pure).

use crate::job::{OutputOptions, StreamMap, Streams};

/// A standard stream; as a number, the index of the stream in a worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StreamKind {
    Stdout,
    Stderr,
}

/// Both streams, in the order of their numbers.
pub const BOTH: [StreamKind; 2] = [StreamKind::Stdout, StreamKind::Stderr];

impl StreamKind {
    /// Returns `stdout` or `stderr`.
    pub fn name(self) -> &'static str {
        match self {
            StreamKind::Stdout => "stdout",
            StreamKind::Stderr => "stderr",
        }
    }

    fn is_in(self, streams: Streams) -> bool {
        match self {
            StreamKind::Stdout => streams.stdout,
            StreamKind::Stderr => streams.stderr,
        }
    }
}

/// The route of one stream of one worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    /// The prefix of each line on the console; None if the stream is not shown.
    pub console: Option<String>,
    /// It goes to its own file.
    pub file: bool,
    /// The prefix of filtered lines, in the file that all workers share; None if lines are not
    /// filtered.
    pub filtered: Option<String>,
}

impl Route {
    /// Whether the worker can write to the file or to `/dev/null` itself, and flow-launch does not
    /// read the stream. It must read a standard error that goes to no file: the failure report
    /// quotes it.
    pub fn is_direct(&self, which: StreamKind) -> bool {
        self.console.is_none()
            && self.filtered.is_none()
            && (self.file || which == StreamKind::Stdout)
    }
}

/// The routes of all streams of a job.
pub struct Routes {
    output: OutputOptions,
    role: String,
    host: String,
    /// Streams have files.
    has_files: bool,
    /// Lines that are not tee'd also get the rank as prefix.
    prefix: bool,
}

impl Routes {
    /// Makes the routes of a job. `is_terminal`: the console is a terminal.
    pub fn new(output: &OutputOptions, role: &str, host: &str, is_terminal: bool) -> Routes {
        Routes {
            output: output.clone(),
            role: role.into(),
            host: host.into(),
            has_files: wants_files(output),
            prefix: is_terminal || output.prefix,
        }
    }

    /// Returns the route of a worker's stream.
    pub fn of(&self, which: StreamKind, rank: u32, local_rank: u32) -> Route {
        let is_teed = self.has_files && which.is_in(self.output.tee.of(local_rank));
        let is_redirected =
            self.has_files && which.is_in(self.output.redirects.of(local_rank)) && !is_teed;
        let is_shown = self.output.shown.as_ref().is_none_or(|shown| shown.contains(&local_rank));
        let tee_prefix = self.tee_prefix(rank, local_rank);
        let console = if is_teed {
            tee_prefix.clone()
        } else if self.prefix {
            format!("[rank {rank}] ")
        } else {
            String::new()
        };
        // torchrun filters only streams that are tee'd. If none is, filter all.
        let is_looked_at = is_teed || !any(&self.output.tee, which);
        let is_filtered = self.has_files && !self.needles(which).is_empty() && is_looked_at;
        Route {
            console: (is_shown && !is_redirected).then_some(console),
            file: is_teed || is_redirected,
            filtered: is_filtered.then_some(tee_prefix),
        }
    }

    /// Returns the texts that select the lines of this stream to copy.
    pub fn needles(&self, which: StreamKind) -> &[String] {
        needles(&self.output, which)
    }

    /// Returns a prefix like torchrun's: `[default0]:`.
    fn tee_prefix(&self, rank: u32, local_rank: u32) -> String {
        let Some(template) = &self.output.prefix_template else {
            return format!("[{}{local_rank}]:", self.role);
        };
        let values = [
            ("role_name", self.role.as_str()),
            ("local_rank", &local_rank.to_string()),
            ("rank", &rank.to_string()),
            ("hostname", &self.host),
        ];
        substitute(template, &values)
    }
}

/// Puts values in place of `${name}` and `$name`, and `$` in place of `$$`, as Python's
/// `Template.safe_substitute`, which torchrun calls. What names no value stays as it is.
fn substitute(template: &str, values: &[(&str, &str)]) -> String {
    let mut text = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once('$') {
        text.push_str(before);
        let is_in_braces = after.starts_with('{');
        let start = usize::from(is_in_braces);
        let end = after[start..].find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let (name, behind) = after[start..].split_at(end.unwrap_or(after.len() - start));
        let behind = if is_in_braces { behind.strip_prefix('}') } else { Some(behind) };
        let value = values.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
        if let Some((value, behind)) = value.zip(behind) {
            text.push_str(value);
            rest = behind;
        } else {
            text.push('$');
            rest = after.strip_prefix('$').unwrap_or(after);
        }
    }
    text + rest
}

fn needles(output: &OutputOptions, which: StreamKind) -> &[String] {
    match which {
        StreamKind::Stdout => &output.stdout_filters,
        StreamKind::Stderr => &output.stderr_filters,
    }
}

/// Whether `--log-dir /dev/null` asks for no files at all.
pub fn is_nowhere(output: &OutputOptions) -> bool {
    output.log_dir.as_deref() == Some("/dev/null".as_ref())
}

/// Whether some stream goes to a file.
pub fn wants_files(output: &OutputOptions) -> bool {
    !is_nowhere(output)
        && BOTH.into_iter().any(|which| {
            any(&output.redirects, which)
                || any(&output.tee, which)
                || !needles(output, which).is_empty()
        })
}

/// Whether the map has this stream for some worker.
fn any(map: &StreamMap, which: StreamKind) -> bool {
    match map {
        StreamMap::All(streams) => which.is_in(*streams),
        StreamMap::Each(each) => each.iter().any(|(_, streams)| which.is_in(*streams)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: StreamMap = StreamMap::All(Streams { stdout: false, stderr: false });
    const ALL: StreamMap = StreamMap::All(Streams { stdout: true, stderr: true });

    fn output(redirects: StreamMap, tee: StreamMap) -> OutputOptions {
        OutputOptions {
            prefix: false,
            log_dir: Some("logs".into()),
            oneflow_names: false,
            redirects,
            tee,
            prefix_template: None,
            shown: None,
            stdout_filters: Vec::new(),
            stderr_filters: Vec::new(),
        }
    }

    fn route(output: &OutputOptions, which: StreamKind, local_rank: u32) -> Route {
        Routes::new(output, "default", "node0", false).of(which, 10 + local_rank, local_rank)
    }

    #[test]
    fn what_is_not_asked_for_goes_to_the_console_only() {
        let plain = output(NONE, NONE);
        assert_eq!(
            route(&plain, StreamKind::Stdout, 0),
            Route { console: Some("".into()), file: false, filtered: None }
        );
        assert!(
            !route(&plain, StreamKind::Stdout, 0).is_direct(StreamKind::Stdout)
                && !wants_files(&plain)
        );
        let marked = Routes::new(&plain, "default", "node0", true).of(StreamKind::Stderr, 10, 0);
        assert_eq!(marked.console.as_deref(), Some("[rank 10] "));
    }

    #[test]
    fn redirects_take_a_stream_off_the_console_and_tee_does_not() {
        let only_stdout_of_1 = StreamMap::Each(vec![(1, Streams { stdout: true, stderr: false })]);
        let redirected = output(only_stdout_of_1.clone(), NONE);
        assert_eq!(
            route(&redirected, StreamKind::Stdout, 1),
            Route { console: None, file: true, filtered: None }
        );
        assert!(route(&redirected, StreamKind::Stdout, 1).is_direct(StreamKind::Stdout));
        assert_eq!(route(&redirected, StreamKind::Stderr, 1).console.as_deref(), Some(""));
        assert_eq!(route(&redirected, StreamKind::Stdout, 0).console.as_deref(), Some(""));
        let both = output(ALL, only_stdout_of_1);
        assert_eq!(
            route(&both, StreamKind::Stdout, 1),
            Route { console: Some("[default1]:".into()), file: true, filtered: None }
        );
        assert_eq!(route(&both, StreamKind::Stderr, 1).console, None);
    }

    #[test]
    fn ranks_that_are_not_shown_still_have_files_and_a_tail() {
        let hidden = OutputOptions {
            shown: Some(vec![0]),
            ..output(NONE, StreamMap::Each(vec![(1, Streams { stdout: true, stderr: true })]))
        };
        assert_eq!(route(&hidden, StreamKind::Stdout, 0).console.as_deref(), Some(""));
        assert_eq!(
            route(&hidden, StreamKind::Stdout, 1),
            Route { console: None, file: true, filtered: None }
        );
        assert_eq!(
            route(&hidden, StreamKind::Stdout, 2),
            Route { console: None, file: false, filtered: None }
        );
        assert!(route(&hidden, StreamKind::Stdout, 2).is_direct(StreamKind::Stdout));
        assert!(!route(&hidden, StreamKind::Stderr, 2).is_direct(StreamKind::Stderr));
    }

    #[test]
    fn filters_look_at_what_is_teed_or_else_at_all() {
        let needles = vec!["loss".to_string()];
        let teed = StreamMap::Each(vec![(1, Streams { stdout: true, stderr: true })]);
        let some = OutputOptions { stdout_filters: needles.clone(), ..output(NONE, teed) };
        assert_eq!(route(&some, StreamKind::Stdout, 0).filtered, None);
        assert_eq!(route(&some, StreamKind::Stdout, 1).filtered.as_deref(), Some("[default1]:"));
        assert_eq!(route(&some, StreamKind::Stderr, 1).filtered, None);
        let all = OutputOptions { stdout_filters: needles, ..output(ALL, NONE) };
        assert_eq!(route(&all, StreamKind::Stdout, 0).filtered.as_deref(), Some("[default0]:"));
        assert!(!route(&all, StreamKind::Stdout, 0).is_direct(StreamKind::Stdout));
    }

    #[test]
    fn without_a_folder_there_are_no_files() {
        let nowhere = OutputOptions {
            log_dir: Some("/dev/null".into()),
            stdout_filters: vec!["x".into()],
            ..output(ALL, ALL)
        };
        assert_eq!(
            route(&nowhere, StreamKind::Stdout, 0),
            Route { console: Some("".into()), file: false, filtered: None }
        );
    }

    #[test]
    fn the_prefix_of_teed_lines_can_be_chosen() {
        for (template, prefix) in [
            ("[${role_name} ${local_rank}/${rank}] ", "[trainer 2/12] "),
            ("${hostname}:$rank: ", "node0:12: "),
            ("$$rank $rank_ ${rank $ ${} ${pid}é$", "$rank $rank_ ${rank $ ${} ${pid}é$"),
        ] {
            let prefix_template = Some(template.to_string());
            let teed = OutputOptions { prefix_template, ..output(NONE, ALL) };
            let route = Routes::new(&teed, "trainer", "node0", true).of(StreamKind::Stdout, 12, 2);
            assert_eq!(route.console.as_deref(), Some(prefix), "{template}");
        }
    }
}
