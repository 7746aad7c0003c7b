//! Timelines of an ideal network, which takes a latency and a time for each byte, for one bucket
//! after the other.

use serde_json::{Value, json};

use super::describe;

const MIB: u64 = 1 << 20;

/// A training. Times are in milliseconds.
#[derive(Clone)]
struct Training {
    group: &'static str,
    /// Its ranks, of which the last one is late.
    ranks: std::ops::Range<u32>,
    late: f64,
    steps: u64,
    /// The bytes of each tensor of each bucket. Gradients come evenly.
    buckets: Vec<Vec<u64>>,
    backward: f64,
    latency: f64,
    per_mib: f64,
}

impl Training {
    /// 32 tensors of a MiB, all but the first in one bucket.
    fn new() -> Self {
        Self {
            group: "0.0:0",
            ranks: 0..2,
            late: 0.0,
            steps: 12,
            buckets: vec![vec![MIB], vec![MIB; 31]],
            backward: 31.0,
            latency: 0.1,
            per_mib: 0.5,
        }
    }

    /// Returns for each bucket when it is full, when it is begun, and when it is reduced.
    fn reduced(&self) -> Vec<(f64, f64, f64)> {
        let count: usize = self.buckets.iter().map(Vec::len).sum();
        let each = self.backward / (count - 1).max(1) as f64;
        let mut reduced = Vec::new();
        let mut free = 0.0_f64;
        let mut tensors = 0;
        for bucket in &self.buckets {
            tensors += bucket.len();
            let queued = each * (tensors.max(1) - 1) as f64;
            let bytes = bucket.iter().sum::<u64>() as f64;
            let begun = free.max(queued + self.late);
            free = begun + self.latency + self.per_mib * bytes / MIB as f64;
            reduced.push((queued, begun, free));
        }
        reduced
    }

    /// Returns the events of a rank in a step.
    fn step(&self, rank: u32, step: u64) -> Vec<Value> {
        let late = if rank + 1 == self.ranks.end { self.late } else { 0.0 };
        let begin = 100.0 * step as f64;
        let reduced = self.reduced();
        let over = reduced.last().unwrap().2;
        let computed = begin + late + self.backward;
        let end = computed.max(begin + over);
        let span = |category: &str, name: &str, start: f64, end: f64, arguments: Value| {
            json!({"ph": "X", "cat": category, "name": name, "pid": rank, "tid": 0,
                   "ts": 1e3 * start, "dur": 1e3 * (end - start), "args": arguments})
        };
        let mut events = vec![
            span("phase", "backward", begin + late, end + 1.0, json!({"step": step})),
            span("wait", "wait", computed, end, json!({"step": step, "bucket": 0})),
        ];
        for (number, (bucket, (queued, _, done))) in self.buckets.iter().zip(&reduced).enumerate() {
            let started = begin + late + queued;
            let arguments = json!({
                "group": self.group, "sequence": step * 100 + number as u64,
                "bytes": bucket.iter().sum::<u64>(), "bucket": number, "backend": "tcp",
                "queued": 1e3 * started, "started": 1e3 * started,
            });
            events.push(span("comm", "all_reduce", started, begin + done, arguments));
        }
        events
    }

    /// Returns what a rank says of its buckets.
    fn described(&self, rank: u32) -> Value {
        let count: usize = self.buckets.iter().map(Vec::len).sum();
        let each = 1e3 * self.backward / (count - 1).max(1) as f64;
        let mut buckets = Vec::new();
        let mut first = 0;
        for tensors in &self.buckets {
            let places = first..first + tensors.len();
            let ready: Vec<u64> = places.map(|place| (each * place as f64) as u64).collect();
            buckets.push(json!({"class": 0, "tensors": tensors, "ready": ready}));
            first += tensors.len();
        }
        json!({"ph": "i", "cat": "buckets", "name": "buckets", "pid": rank, "tid": 0, "ts": 1.0,
               "args": {"group": self.group, "step": 1, "buckets": buckets}})
    }

    fn events(&self) -> Vec<Value> {
        let mut events = Vec::new();
        for rank in self.ranks.clone() {
            events.push(self.described(rank));
            events.extend((0..self.steps).flat_map(|step| self.step(rank, step)));
        }
        events
    }
}

fn text(events: Vec<Value>, world_size: u32) -> String {
    let timeline = json!({"traceEvents": events, "otherData": {"world_size": world_size}});
    describe(&serde_json::from_value(timeline).unwrap())
}

/// The last line of what is said of a training on two ranks.
fn advice(training: &Training) -> String {
    last_line(training.events())
}

fn last_line(events: Vec<Value>) -> String {
    text(events, 2).lines().last().unwrap_or_default().to_owned()
}

/// The events with one that `change` has changed, of those with this `cat`.
fn changed(category: &str, change: impl Fn(&mut Value)) -> Vec<Value> {
    let mut events = Training::new().events();
    events.iter_mut().filter(|event| event["cat"] == category).for_each(change);
    events
}

#[test]
fn the_bucket_that_is_waited_for_is_in_the_table() {
    let text = text(Training::new().events(), 2);
    let lines: Vec<_> = text.lines().skip(1).collect();
    let expected = [
        "buckets of group 0.0:0: 10 steps of 100 ms, of which ranks wait 16 ms for buckets",
        "bucket      MiB   queued ms   takes ms   wait ms   of a step   for",
        "     1    31.00        31.0      15.60     15.60       15.6%   the network",
    ];
    assert_eq!(lines[..3], expected);
}

#[test]
fn what_is_advised_leaves_the_wait_that_was_estimated() {
    let mut training = Training::new();
    let expected = "16 ms of 100 are a wait for bucket 1 (31.0 MiB, the last one that backward \
                    completes); bucket_cap_mb_list(&[16.0, 4.0]) would leave about 2.1 ms of 16";
    assert_eq!(advice(&training), expected);
    training.buckets = vec![vec![MIB; 16], vec![MIB; 4], vec![MIB; 4], vec![MIB; 4], vec![MIB; 4]];
    let text = text(training.events(), 2);
    assert!(text.contains(" of which ranks wait 2.1 ms for buckets\n"), "{text}");
}

#[test]
fn one_bucket_is_to_be_divided_and_one_gradient_cannot_be() {
    let mut training = Training::new();
    training.buckets = vec![vec![MIB; 32]];
    let expected = "16 ms of 100 are a wait for bucket 0 (32.0 MiB, the only one); smaller ones \
                    would begin earlier: try a quarter of that as bucket_cap_mb";
    assert_eq!(advice(&training), expected);
    training.buckets = vec![vec![MIB], vec![31 * MIB]];
    let expected = "16 ms of 100 are a wait for bucket 1 (31.0 MiB, the last one that backward \
                    completes); no other size would leave much less: one gradient fills it";
    assert_eq!(advice(&training), expected);
}

#[test]
fn buckets_of_one_size_say_nothing_of_smaller_ones() {
    let mut training = Training::new();
    training.buckets = vec![vec![MIB; 16], vec![MIB; 16]];
    let advice = advice(&training);
    assert!(
        advice.ends_with(
            "no estimate: all buckets are of about one size, or larger ones take no longer"
        ),
        "{advice}"
    );
}

#[test]
fn a_late_rank_is_named() {
    let mut training = Training::new();
    training.late = 12.0;
    training.per_mib = 0.1;
    training.buckets = vec![vec![MIB; 16], vec![MIB; 15], vec![MIB]];
    let expected =
        "the others wait 11 ms for rank 1, which begins bucket 1 late: no size of buckets helps";
    assert_eq!(advice(&training), expected);
}

#[test]
fn more_communication_than_backward_cannot_be_hidden() {
    let mut training = Training::new();
    training.per_mib = 2.0;
    let text = text(training.events(), 2);
    let expected = "communication takes longer than backward (64 ms of 31): no size hides all of \
                    it; send less by a communication hook (docs/ddp.md)";
    assert!(text.lines().any(|line| line == expected), "{text}");
}

#[test]
fn what_is_hidden_needs_no_advice() {
    let mut training = Training::new();
    training.buckets = vec![vec![MIB; 16], vec![MIB; 15], vec![MIB]];
    training.per_mib = 0.01;
    assert_eq!(advice(&training), "nothing to gain: 0.1 ms of 100");
}

#[test]
fn few_steps_and_missing_ranks_allow_no_estimate() {
    let mut training = Training::new();
    assert_eq!(
        text(training.events(), 3).lines().last(),
        Some("no estimate: the timeline lacks 1 ranks, which others may wait for")
    );
    training.steps = 6;
    let expected = "buckets of group 0.0:0: 4 steps that can be compared, too few for an estimate";
    assert_eq!(advice(&training), expected);
    assert_eq!(text(Vec::new(), 2), "");
}

#[test]
fn too_few_steps_have_a_reason() {
    let events = changed("wait", |event| event["args"]["bucket"] = json!(7));
    let sparse = |mut event: Value| {
        if event["cat"] == "buckets" {
            event["args"]["buckets"][0]["tensors"] = json!([0]);
        }
        event
    };
    assert_eq!(
        last_line(events.into_iter().map(sparse).collect()),
        "buckets of group 0.0:0: 0 steps that can be compared, too few for an estimate: some buckets are \
         reduced by a communication hook, or are sparse"
    );
}

#[test]
fn many_short_waits_have_no_table() {
    let mut training = Training::new();
    training.buckets = vec![vec![MIB / 100]; 3000];
    training.latency = 0.02;
    let text = text(training.events(), 2);
    assert!(text.contains("are a wait for bucket"), "{text}");
    assert!(!text.contains("queued ms"), "{text}");
}

#[test]
fn what_sizes_do_not_explain_allows_no_estimate() {
    let expect = |events: Vec<Value>, doubt: &str| {
        assert_eq!(last_line(events), format!("no estimate: {doubt}"));
    };
    expect(changed("comm", |event| event["args"]["failed"] = json!(true)), "a bucket has failed");
    expect(
        changed("comm", |event| event["args"]["backend"] = json!("nccl")),
        "the host does not wait for GPUs; Ddp::stats() has their times",
    );
    expect(
        changed("buckets", |event| event["args"]["buckets"][1]["class"] = json!(1)),
        "not all gradients are of one type",
    );
    expect(
        changed("wait", |event| event["args"]["bucket"] = json!(7)),
        "some buckets are reduced by a communication hook, or are sparse",
    );
    expect(
        changed("wait", |event| event["ts"] = json!(event["ts"].as_f64().unwrap() - 30e3)),
        "backward waits for buckets in its middle, too",
    );
    let mut events = Training::new().events();
    events.retain(|event| event["cat"] != "buckets");
    let last = last_line(events);
    assert!(
        last.ends_with("no estimate: the timeline does not say which tensors it has"),
        "{last}"
    );
}

#[test]
fn reductions_of_hooks_are_not_known() {
    let mut events = Training::new().events();
    events.retain(|event| event["cat"] != "comm");
    let expected = "buckets: a communication hook reduces them, or they are sparse: no estimate";
    assert_eq!(last_line(events), expected);
}

#[test]
fn buckets_without_bytes_are_no_obstacle() {
    let mut training = Training::new();
    training.buckets = vec![vec![0], vec![0, 0], vec![MIB; 31], vec![0]];
    let advice = advice(&training);
    assert!(advice.contains("are a wait for bucket 2 (31.0 MiB); bucket_cap_mb"), "{advice}");
    training.buckets = vec![vec![0], vec![0; 3]];
    assert_eq!(self::advice(&training), "nothing to gain: 0.1 ms of 100");
}

#[test]
fn each_group_has_its_own_advice() {
    let mut other = Training::new();
    other.group = "0.0:1";
    other.ranks = 2..4;
    other.late = 5.0;
    other.per_mib = 0.1;
    let text = text([Training::new().events(), other.events()].concat(), 4);
    for group in ["0.0:0", "0.0:1"] {
        assert!(
            text.contains(&format!("\nbuckets of group {group}: 10 steps of 100 ms")),
            "{text}"
        );
    }
    assert!(text.contains("would leave about"), "{text}");
}

#[test]
fn models_that_share_a_backward_allow_no_estimate() {
    let first = Training::new();
    let mut second = Training::new();
    second.group = "0.0:1";
    let mut events = first.events();
    let mut of_second = second.events();
    of_second.retain(|event| event["cat"] == "comm");
    events.extend(of_second);
    let text = text(events, 2);
    assert!(text.contains("\nno estimate: one backward goes through several models\n"), "{text}");
}
