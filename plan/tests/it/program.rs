//! The program `flow-plan`, as users run it, and what docs/planner.md shows of it.

use std::fs;
use std::process::Command;

use serde_json::Value;

const PAGE: &str = include_str!("../../../docs/planner.md");

/// Runs `flow-plan` with these words; returns whether it succeeded, its output and its errors.
fn run(arguments: &str) -> (bool, String, String) {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let program = env!("CARGO_BIN_EXE_flow-plan");
    let arguments = arguments.split_whitespace();
    let output = Command::new(program).args(arguments).current_dir(root).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

fn output(arguments: &str) -> String {
    let (succeeded, output, errors) = run(arguments);
    assert!(succeeded, "flow-plan {arguments}: {errors}");
    output
}

/// The only line that it prints.
fn error(arguments: &str) -> String {
    let (succeeded, output, errors) = run(arguments);
    assert!(!succeeded && output.is_empty(), "flow-plan {arguments}: {output}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
    errors
}

/// A file with this text, which is gone with the folder.
fn file(text: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.json");
    fs::write(&path, text).unwrap();
    let path = path.display().to_string();
    (folder, path)
}

const GPT3: &str = "plan/models/gpt3-175b.json --cluster plan/models/dgx-a100.json";

#[test]
fn the_page_shows_what_the_program_prints() {
    let commands: Vec<&str> =
        PAGE.lines().filter_map(|line| line.strip_prefix("$ flow-plan ")).collect();
    assert!(commands.len() > 3, "{commands:?}");
    for command in commands {
        let shown = format!("$ flow-plan {command}\n{}", output(command));
        assert!(PAGE.contains(&shown), "docs/planner.md differs from\n{shown}");
    }
}

#[test]
fn published_runs_are_predicted() {
    let compare = |runs: &str| -> Vec<f64> {
        let text = output(&format!("compare plan/models/{runs} --json"));
        let rows: Vec<Value> = serde_json::from_str(&text).unwrap();
        rows.iter().map(|row| row["error"].as_f64().unwrap()).collect()
    };
    let dgx = "--cluster plan/models/dgx-a100.json";
    let table1 = compare(&format!("megatron-table1.json {dgx}"));
    assert_eq!(table1.len(), 10);
    assert!(table1.iter().all(|error| error.abs() < 0.05), "{table1:?}");
    let table2 = compare(&format!("megatron-table2.json {dgx}"));
    assert_eq!(table2.len(), 12);
    assert!(table2.iter().all(|error| error.abs() < 0.2), "{table2:?}");
    let table5 = compare(&format!("korthikanti-table5.json {dgx}"));
    assert_eq!(table5.len(), 8);
    assert!(table5.iter().all(|error| error.abs() < 0.15), "{table5:?}");
    let fsdp = compare("fsdp-llama2.json");
    assert_eq!(fsdp.len(), 3);
    assert!(fsdp.iter().all(|error| error.abs() < 0.1), "{fsdp:?}");
}

/// What each term of `gathering` is worth for the runs of ZeRO-3, as docs/planner.md says.
#[test]
fn the_terms_of_gathering_are_worth_what_the_page_says() {
    let text =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/models/megatron-table2.json"));
    let mut runs: Value = serde_json::from_str(&text.unwrap()).unwrap();
    let all = runs["training"]["gathering"].take();
    let no_copies = serde_json::json!({ "tensors": all["tensors"], "again": all["again"] });
    let mut slow_copies = all.clone();
    slow_copies["memory_passes"] = (all["memory_passes"].as_f64().unwrap() * 2.0 / 0.9).into();
    let mut no_passes = all.clone();
    no_passes["memory_passes"] = 0.into();
    let terms = [
        ("none: a layer at a time, twice", serde_json::json!({})),
        ("`tensors` and `again`", no_copies),
        ("`rank_seconds` too", no_passes),
        ("all", all),
        ("all, with copies as slow as on a V100", slow_copies),
    ];
    for (name, gathering) in terms {
        runs["training"]["gathering"] = gathering;
        let (_folder, path) = file(&runs.to_string());
        let rows = output(&format!("compare {path} --cluster plan/models/dgx-a100.json --json"));
        let rows: Vec<Value> = serde_json::from_str(&rows).unwrap();
        let errors = rows[6..].iter().map(|row| 100.0 * row["error"].as_f64().unwrap());
        let errors: Vec<String> = errors.map(|error| format!("{error:+.1}%")).collect();
        let line =
            format!("| {name} | {} | {} |\n", errors[..3].join(", "), errors[3..].join(", "));
        assert!(PAGE.contains(&line), "docs/planner.md differs from: {line}");
    }
}

#[test]
fn layouts_come_in_order_and_always_the_same() {
    let command = format!("{GPT3} -n 3072 --top 40 --json");
    let first = output(&command);
    assert_eq!(first, output(&command));
    let plans: Vec<Value> = serde_json::from_str(&first).unwrap();
    assert_eq!(plans.len(), 40);
    let steps: Vec<f64> = plans.iter().map(|plan| plan["time"]["step"].as_f64().unwrap()).collect();
    assert!(steps.is_sorted(), "{steps:?}");
}

#[test]
fn the_layout_of_the_issue_is_possible() {
    let command = format!("{GPT3} -n 3072 --pp 64 --dp 6 --tp 8 --json");
    let plans: Vec<Value> = serde_json::from_str(&output(&command)).unwrap();
    for plan in &plans {
        let layout = &plan["layout"];
        assert_eq!((&layout["pipeline"], &layout["data"]), (&64.into(), &6.into()));
        assert_eq!(plan["pipeline_traffic"]["intra_node"], 0.0);
        assert_eq!(plan["tensor_traffic"]["inter_node"], 0.0);
    }
}

/// It has no selective recomputation, no ZeRO 2 but `Fsdp`, and ZeRO 3 for data parallelism alone.
#[test]
fn what_flow_lacks_is_listed_only_if_asked_for() {
    let layouts = |wanted: &str| -> Vec<Value> {
        let text = output(&format!("{GPT3} -n 384 --top 1000 --json {wanted}"));
        let plans: Vec<Value> = serde_json::from_str(&text).unwrap();
        plans.into_iter().map(|plan| plan["layout"].clone()).collect()
    };
    let all = layouts("");
    let of = |key: &str, value: Value| all.iter().filter(|layout| layout[key] == value).count();
    assert_eq!(of("recompute", "none".into()) + of("recompute", "full".into()), all.len());
    for layout in all.iter().filter(|layout| layout["zero"] == 3) {
        assert_eq!((&layout["tensor"], &layout["pipeline"]), (&1.into(), &1.into()));
    }
    assert_eq!(of("zero", 2.into()), 0);
    let wanted = layouts("--zero 2 --recompute selective");
    assert!(!wanted.is_empty());
    let is_wanted = |layout: &Value| layout["zero"] == 2 && layout["recompute"] == "selective";
    assert!(wanted.iter().all(is_wanted), "{wanted:?}");
}

/// `Fsdp` is tried where ranks can share memory, and only there.
#[test]
fn shared_weights_are_tried_where_ranks_share_memory() {
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/models/gpt.json")).unwrap();
    let mut model: Value = serde_json::from_str(&text).unwrap();
    let layouts = |model: &Value, wanted: &str| {
        let (_folder, path) = file(&model.to_string());
        output(&format!("{path} -n 8 --top 1000 {wanted}"))
    };
    assert!(!layouts(&model, "").contains("Fsdp"));
    model["cluster"]["shared_memory"] = true.into();
    assert!(layouts(&model, "").contains("Fsdp"));
    assert!(!layouts(&model, "--shared-weights false").contains("Fsdp"));
    let only = layouts(&model, "--shared-weights true --explain");
    let layouts: Vec<&str> = only.lines().filter(|line| line.starts_with("dp ")).collect();
    assert!(!layouts.is_empty(), "{only}");
    let is_fsdp = |line: &&str| line.starts_with("dp 8 ") && line.contains("shared weights");
    assert!(layouts.iter().all(is_fsdp), "{only}");
    assert!(only.contains("once for 8 ranks"), "{only}");
}

#[test]
fn a_model_may_have_its_cluster() {
    let text = output("plan/models/gpt.json --ranks 8 --top 3");
    assert_eq!(text.lines().count(), 5, "{text}");
}

/// All layouts that there are are tried, also where batch and ranks have very many divisors.
#[test]
fn all_layouts_are_tried() {
    for (batch, ranks, layouts) in [(1536, 3072, 35_756), (20_160, 10_080, 172_484)] {
        let (_folder, path) = file(&format!(
            r#"{{ "transformer": {{ "layers": 96, "hidden": 12288, "heads": 96, "sequence": 2048,
                 "vocabulary": 51200 }}, "batch": {batch} }}"#,
        ));
        let text = output(&format!("{path} --cluster plan/models/dgx-a100.json -n {ranks}"));
        assert!(text.contains(&format!("{layouts} layouts, ")), "{text}");
    }
}

/// The two runs on one rank and two others were used to choose numbers of the cluster. The others
/// are predicted better than by dividing one rank's time by the cores, as docs/planner.md says.
#[test]
fn runs_on_two_cores_are_predicted_better_than_by_the_cores_alone() {
    let rows: Vec<Value> =
        serde_json::from_str(&output("compare plan/models/gpt-2-cores.json --json")).unwrap();
    let sizes = |row: &Value| {
        ["data", "tensor", "pipeline"]
            .map(|axis| row["prediction"]["layout"][axis].as_f64().unwrap())
    };
    let ranks = |row: &Value| sizes(row).iter().product::<f64>();
    let seconds = |row: &Value| row["measured"]["seconds"].as_f64().unwrap();
    let width = |row: &Value| row["name"].as_str().unwrap()[..9].to_owned();
    let (mut model, mut cores, mut count) = (0.0, 0.0, 0.0);
    for row in rows.iter().filter(|row| row["fitted"] == false) {
        let is_one = |other: &&Value| ranks(other) == 1.0 && width(other) == width(row);
        let one = seconds(rows.iter().find(is_one).unwrap());
        model += row["error"].as_f64().unwrap().abs();
        cores += (one / ranks(row).min(2.0) / seconds(row) - 1.0).abs();
        count += 1.0;
    }
    let shown = [model, cores].map(|sum| format!("{:.1}%", 100.0 * sum / count));
    let sentence = format!("{} on average, and that by the cores alone {}", shown[0], shown[1]);
    assert!(PAGE.contains(&sentence), "docs/planner.md differs from: {sentence}");
    assert!(model < 0.6 * cores, "{sentence}");
    let memory: Vec<f64> = rows.iter().map(|row| row["memory_error"].as_f64().unwrap()).collect();
    assert!(memory.iter().all(|error| (-0.08..0.0).contains(error)), "{memory:?}");

    let (mut pairs, mut right) = (0, 0);
    for (index, row) in rows.iter().enumerate() {
        let is_alike = |other: &&Value| width(other) == width(row) && ranks(other) == ranks(row);
        for other in rows[index + 1..].iter().filter(is_alike) {
            let predicted = |row: &Value| row["predicted"].as_f64().unwrap();
            pairs += 1;
            let is_right = (seconds(row) < seconds(other)) == (predicted(row) < predicted(other));
            right += usize::from(is_right);
        }
    }
    let sentence = format!("Of {pairs} such pairs it has {right} in the right order");
    assert!(PAGE.contains(&sentence), "docs/planner.md differs from: {sentence}");
}

#[test]
fn a_model_may_be_a_list_of_layers() {
    let (_folder, path) = file(
        r#"{ "layers": [
               { "repeat": 4, "parameters": 1e6, "flops": 2e6, "input": 4000, "activations": 8000 },
               { "parameters": 1e4, "flops": 2e4 } ],
             "batch": 64 }"#,
    );
    let text =
        output(&format!("{path} --cluster plan/models/dgx-a100.json -n 4 --top 99 --explain"));
    assert!(text.contains("dp 4 x tp 1 x pp 1"), "{text}");
    // These layers cannot be split.
    assert!(!text.contains("tp 2"), "{text}");
}

#[test]
fn bad_input_is_a_line_that_says_what_is_wrong() {
    let with = |text: &str, arguments: &str| {
        let (_folder, path) = file(text);
        error(&format!("{path} {arguments}"))
    };
    let dgx = "--cluster plan/models/dgx-a100.json -n 8";
    let shape = r#""layers": 2, "hidden": 8, "heads": 2, "sequence": 4, "vocabulary": 8"#;
    let gpt = |rest: &str| format!(r#"{{ "transformer": {{ {shape} }}, "batch": 8 {rest} }}"#);
    let cases = [
        (r#"{ "batch": 8 }"#.to_owned(), "transformer is missing: give `transformer` or `layers`"),
        (r#"{ "transformer": { "layers": 2 } }"#.to_owned(), "transformer: missing field `hidden`"),
        (format!(r#"{{ "transformer": {{ {shape} }} }}"#), "top level: missing field `batch`"),
        (gpt(r#", "bath": 3"#), "bath: unknown field `bath`"),
        (gpt(r#", "layers": []"#), "layers is given beside `transformer`: give one of the two"),
        (gpt(r#", "training": { "element": "f32" }"#), "training.element: invalid type: string"),
        (gpt(r#", "training": { "data_overlap": 2 }"#), "training.data_overlap is 2: give a share"),
        (gpt("").replace(r#""heads": 2"#, r#""heads": 3"#), "transformer.heads is 3: give"),
        (gpt("").replace(r#""batch": 8"#, r#""batch": 0"#), "batch is 0: give the samples"),
        (gpt(r#", "layout": { "zero": 9 }"#), "layout.zero is 9: give 0 to 3"),
        (gpt(r#", "layout": { "data": 0 }"#), "layout.data is 0: give 1 or more"),
        (r#"{ "layers": [], "batch": 8 }"#.to_owned(), "layers is []: give at least one layer"),
        (gpt("") + "x", "after the end: trailing characters at line 1"),
    ];
    for (text, expected) in cases {
        let line = with(&text, dgx);
        assert!(line.starts_with("flow-plan: ") && line.contains(expected), "{line}");
    }
    assert!(with(&gpt(""), "-n 8").contains("cluster is missing: give the machines"));
    assert!(error("no-such.json -n 8").contains("no-such.json: No such file"));
    let line = error(&format!("{GPT3} -n 8"));
    assert!(line.contains("layouts fits in 80.0 GB a rank; the smallest needs"), "{line}");
    let line = error(&format!("{GPT3} -n 64 --dp 3 --tp 8"));
    assert!(line.contains("dp 3 x tp 8 x pp any are not 64"), "{line}");
    let line =
        error(&format!("{GPT3} -n 64 --dp 1 --tp 8 --pp 8 --schedule interleaved --chunks 1"));
    assert!(line.contains("interleaved takes 2 chunks or more"), "{line}");
    for (arguments, reason) in [
        ("--micro-batch 7", "x 7 samples do not divide the batch of 1536"),
        ("--pp 12 --chunks 9", "108 stages are more than the model's 98 layers"),
        ("--schedule 1f1b --chunks 2", "1f1b takes 1 chunk, not 2"),
        ("--dp 4294967296 --tp 4294967296", "x tp 4294967296 x pp any are not 96"),
        ("--schedule zbv", "invalid value 'zbv' for '--schedule <NAME>' [possible values: gpipe"),
    ] {
        let line = error(&format!("{GPT3} -n 96 {arguments}"));
        assert!(line.contains(reason), "{arguments}: {line}");
    }
    assert!(error(&format!("{GPT3} -n 0")).contains("invalid value '0' for '--ranks <N>'"));
    let line = error("schedule --pp 2 --micro-batches 2 --send -1");
    assert!(line.contains("a cost of -1; costs are finite numbers"), "{line}");
}

#[test]
fn schedules_are_drawn() {
    let text = output("schedule 1f1b --pp 2 --micro-batches 2");
    assert_eq!(text, "rank 0: F0 F1 ..... B0--- .. B1---\nrank 1: .. F0 B0--- F1 B1--- .....\n");
    let text = output("schedule --pp 4 --micro-batches 16");
    assert_eq!(text.lines().count(), 6, "{text}");
}
