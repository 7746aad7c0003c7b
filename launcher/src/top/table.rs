//! The lines of the screen. Pure.

use std::collections::BTreeMap;

use crate::report::text::{printable, ranks};
use crate::top::view::{ChangeView, RankView, View};

/// How many changes are shown.
const CHANGES: usize = 5;

/// What was shown before: the processors' time of each process, and when.
#[derive(Default)]
pub struct Before {
    cpu: BTreeMap<(u32, i32), f64>,
    uptime: BTreeMap<(u32, i32), f64>,
}

impl Before {
    /// Returns the share of a processor that each rank has used since, and keeps what is now.
    pub fn cpu_shares(&mut self, view: &View) -> Vec<Option<f64>> {
        view.ranks.iter().map(|rank| self.cpu_share(rank)).collect()
    }

    fn cpu_share(&mut self, view: &RankView) -> Option<f64> {
        let key = (view.rank, view.pid);
        let cpu = view.cpu_seconds?;
        let before = self.cpu.insert(key, cpu);
        let since = self.uptime.insert(key, view.uptime_seconds);
        // At first, since its start.
        let time = view.uptime_seconds - since.unwrap_or(0.0);
        (time > 0.0).then(|| (cpu - before.unwrap_or(0.0)).max(0.0) / time)
    }
}

/// Returns the lines for a terminal of so many rows and columns, with the share of a processor that each rank
/// uses. The first line ends with `hint`.
pub fn lines(
    view: &View,
    cpu_shares: &[Option<f64>],
    rows: usize,
    columns: usize,
    hint: &str,
) -> Vec<String> {
    let mut head = vec![heading(view) + hint];
    if !view.silent.is_empty() {
        head.push(format!("no answer from {}", printable(&view.silent.join(", "))));
    }
    let mut foot: Vec<String> = Vec::new();
    let first = view.changes.len().saturating_sub(CHANGES);
    for change in &view.changes[first..] {
        foot.push(change_line(change));
    }
    if !foot.is_empty() {
        foot.insert(0, String::new());
    }
    let mut table = vec![COLUMNS.map(String::from)];
    for (rank, cpu_share) in view.ranks.iter().zip(cpu_shares) {
        table.push(cells(rank, *cpu_share));
    }
    let mut body = aligned(&table);
    let room = rows.saturating_sub(head.len() + foot.len()).max(2);
    if body.len() > room {
        let more = body.len() - (room - 1);
        body.truncate(room - 1);
        body.push(format!("{more} more"));
    }
    head.extend(body);
    head.extend(foot);
    head.truncate(rows);
    for line in &mut head {
        *line = line.chars().take(columns).collect();
    }
    head
}

fn heading(view: &View) -> String {
    let mut hosts: Vec<&str> = view.ranks.iter().map(|rank| rank.host.as_str()).collect();
    hosts.sort_unstable();
    hosts.dedup();
    let count = |number: usize, what: &str| match number {
        1 => format!("1 {what}"),
        number => format!("{number} {what}s"),
    };
    format!(
        "job {}: {}, {}",
        printable(&view.job),
        count(hosts.len(), "host"),
        count(view.ranks.len(), "rank")
    )
}

const COLUMNS: [&str; 10] =
    ["rank", "host", "pid", "step", "time", "comm", "memory", "cpu", "up", "again"];

/// Returns a rank's cells, and what it does.
fn cells(view: &RankView, cpu: Option<f64>) -> [String; 10] {
    let dash = || "-".to_string();
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    [
        view.rank.to_string(),
        printable(&view.host),
        view.pid.to_string(),
        view.steps.map_or_else(dash, |steps| steps.to_string()),
        view.step_seconds.map_or_else(dash, time),
        view.communication.map_or_else(dash, percent),
        view.memory_bytes.map_or_else(dash, bytes),
        cpu.map_or_else(dash, percent),
        time(view.uptime_seconds),
        format!("{}  {}", view.restarts, does(view)),
    ]
}

/// Says what a rank does.
fn does(view: &RankView) -> String {
    if view.state != "running" {
        return printable(&view.state);
    }
    let Some(operation) = &view.operation else { return String::new() };
    let bucket = operation.bucket.map_or(String::new(), |bucket| format!(" (bucket {bucket})"));
    let name = format!("{} #{}{bucket}", printable(&operation.name), operation.sequence);
    let waits = match view.waits_for.as_slice() {
        [] => String::new(),
        missing => format!(", waits for {}", ranks(missing)),
    };
    if operation.is_under_way {
        format!("in {name} for {}{waits}", time(operation.seconds))
    } else {
        format!("{name} {} ago", time(operation.seconds))
    }
}

fn change_line(change: &ChangeView) -> String {
    let cost = match change.cost_seconds {
        Some(cost) => format!("; the next step was over {} later", time(cost)),
        None => String::new(),
    };
    format!("{} ago: {}{cost}", time(change.seconds_ago), printable(&change.what))
}

/// Puts cells below each other. Numbers end at the same place; hosts, and the last column, begin there.
fn aligned(table: &[[String; 10]]) -> Vec<String> {
    let last = COLUMNS.len() - 1;
    let width = |column: usize| table.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..last).map(|column| width(column).unwrap_or(0)).collect();
    let mut lines = Vec::new();
    for row in table {
        let mut line = String::new();
        for (column, width) in widths.iter().copied().enumerate() {
            let cell = &row[column];
            line += &match column {
                1 => format!("{cell:<width$}  "),
                _ => format!("{cell:>width$}  "),
            };
        }
        line += &row[last];
        lines.push(line.trim_end().to_string());
    }
    lines
}

/// A time in the unit that fits.
fn time(seconds: f64) -> String {
    match seconds {
        _ if seconds < 0.001 => format!("{:.0} us", seconds * 1e6),
        _ if seconds < 1.0 => format!("{:.0} ms", seconds * 1e3),
        _ if seconds < 60.0 => format!("{seconds:.1} s"),
        _ if seconds < 3600.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

fn bytes(bytes: u64) -> String {
    match bytes as f64 {
        bytes if bytes < 1e9 => format!("{:.0} MB", bytes / 1e6),
        bytes => format!("{:.1} GB", bytes / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::status::Operation;

    fn rank(rank: u32) -> RankView {
        RankView {
            rank,
            host: "node\x1b[1m".into(),
            pid: 1234,
            state: "running".into(),
            restarts: 1,
            uptime_seconds: 90.0,
            memory_bytes: Some(1_230_000_000),
            cpu_seconds: Some(45.0),
            steps: Some(812),
            step_seconds: Some(0.103),
            since_step_seconds: Some(0.01),
            communication: Some(0.12),
            operation: Some(Operation {
                group: "0".into(),
                name: "all_reduce".into(),
                sequence: 812,
                bucket: Some(1),
                is_collective: true,
                is_under_way: true,
                seconds: 3.1,
            }),
            waits_for: vec![1],
        }
    }

    fn plain(number: u32) -> RankView {
        RankView {
            steps: None,
            step_seconds: None,
            communication: None,
            operation: None,
            cpu_seconds: None,
            memory_bytes: None,
            ..rank(number)
        }
    }

    fn view(ranks: Vec<RankView>) -> View {
        let change = |seconds_ago, cost_seconds| ChangeView {
            seconds_ago,
            what: "rank 1 failed".into(),
            cost_seconds,
        };
        let changes = vec![change(100.0, Some(0.25)), change(0.5, None)];
        View { job: "j".into(), ranks, silent: vec!["h".into()], changes }
    }

    #[test]
    fn a_line_says_what_each_rank_does() {
        let view = view(vec![rank(0), plain(10)]);
        let shares = Before::default().cpu_shares(&view);
        let lines = lines(&view, &shares, 24, 200, "; q ends this");
        let expected = [
            "job j: 1 host, 2 ranks; q ends this",
            "no answer from h",
            r"rank  host            pid  step    time  comm  memory   cpu     up  again",
            r"   0  node\u{1b}[1m  1234   812  103 ms  12 %  1.2 GB  50 %  2 min  1  in all_reduce #812 (bucket 1) for 3.1 s, waits for rank 1",
            r"  10  node\u{1b}[1m  1234     -       -     -       -     -  2 min  1",
            "",
            "2 min ago: rank 1 failed; the next step was over 250 ms later",
            "500 ms ago: rank 1 failed",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn the_screen_is_never_left() {
        for (rows, columns) in [(0, 0), (1, 1), (5, 20), (8, 80), (60, 300)] {
            let view = view((0..40).map(rank).collect());
            let lines = lines(&view, &vec![None; view.ranks.len()], rows, columns, "");
            assert!(lines.len() <= rows);
            assert!(lines.iter().all(|line| line.chars().count() <= columns));
            if rows == 8 {
                assert!(lines.iter().any(|line| line == "39 more"), "{lines:?}");
            }
        }
    }

    #[test]
    fn processors_are_shared_since_the_last_look() {
        let mut before = Before::default();
        assert_eq!(before.cpu_share(&rank(0)), Some(0.5));
        let later = RankView { uptime_seconds: 92.0, cpu_seconds: Some(48.0), ..rank(0) };
        assert_eq!(before.cpu_share(&later), Some(1.5));
        assert_eq!(before.cpu_share(&plain(0)), None);
    }
}
