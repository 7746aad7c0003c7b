//! The programs with global tensors give the shapes and the values of OneFlow's documents.

use flow_tests::{Process, TEST_TIMEOUT, launch, launcher, runs_apart};
use serde_json::{Value, json};
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Kind, Tensor};

type Matrix = Vec<Vec<f64>>;

/// The matrix that rank 0 has printed as this.
fn matrix(output: &str, name: &str) -> Matrix {
    let start = format!("{name} = ");
    let line = output.lines().find_map(|line| line.strip_prefix(&start));
    let line = line.unwrap_or_else(|| panic!("no {name}: {output}"));
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

fn product(a: &Matrix, b: &Matrix) -> Matrix {
    let element = |row: &[f64], column: usize| row.iter().zip(b).map(|(x, y)| x * y[column]).sum();
    let of_row = |row: &Vec<f64>| (0..b[0].len()).map(|column| element(row, column)).collect();
    a.iter().map(of_row).collect()
}

fn transposed(a: &Matrix) -> Matrix {
    (0..a[0].len()).map(|column| a.iter().map(|row| row[column]).collect()).collect()
}

fn ones(rows: usize, columns: usize) -> Matrix {
    vec![vec![1.0; columns]; rows]
}

#[track_caller]
fn assert_close(a: &Matrix, b: &Matrix) {
    let sizes = |m: &Matrix| (m.len(), m[0].len());
    assert_eq!(sizes(a), sizes(b));
    let elements = a.iter().flatten().zip(b.iter().flatten());
    assert!(elements.into_iter().all(|(x, y)| (x - y).abs() < 1e-4), "{a:?} {b:?}");
}

/// That the ranks have printed these lines, and no others, of how `name` lies.
#[track_caller]
fn assert_layout(output: &str, name: &str, sbp: &str, locals: &[&str]) {
    let is_of = |line: &&str| line.split_once(": ").is_some_and(|(_, rest)| rest.starts_with(name));
    let mut lines: Vec<&str> = output.lines().filter(is_of).collect();
    lines.sort_unstable();
    let expected = locals.iter().enumerate();
    let expected = expected.map(|(rank, here)| format!("rank {rank}: {name} {sbp}, here {here}"));
    assert_eq!(lines, expected.collect::<Vec<_>>(), "{output}");
}

#[test]
fn the_product_on_one_device() {
    let output = launch(1, "global", &["matmul"]);
    assert!(output.starts_with("[4, 8]\n"), "{output}");
    let [x, w, out] = ["x", "w", "out"].map(|name| matrix(&output, name));
    assert_close(&out, &product(&x, &w));
}

/// On two ranks, and on two of four: those outside have nothing, and know the shape.
#[test]
fn data_and_model_parallel_give_the_same_values() {
    let mut values = Vec::new();
    for ranks in [2, 4] {
        for (program, sbp, here) in
            [("data-parallel", "[S(0)]", "[2, 8]"), ("model-parallel", "[S(1)]", "[4, 4]")]
        {
            let output = launch(ranks, "global", &[program]);
            let locals = [here, here, "[0]", "[0]"];
            assert_layout(&output, "out", &format!("[4, 8] {sbp} on [0, 1]"), &locals[..ranks]);
            let [x, w, out] = ["x", "w", "out"].map(|name| matrix(&output, name));
            assert_close(&out, &product(&x, &w));
            if program == "data-parallel" {
                let locals = ["[5, 8]", "[5, 8]", "[0]", "[0]"];
                assert_layout(&output, "w.grad", "[5, 8] [B] on [0, 1]", &locals[..ranks]);
                assert_close(&matrix(&output, "w.grad"), &product(&transposed(&x), &ones(4, 8)));
            }
            values.push((x, w));
        }
    }
    assert!(values.iter().all(|other| *other == values[0]));
}

#[test]
fn each_stage_has_a_placement_of_its_own() {
    let output = launch(2, "global", &["two-placements"]);
    assert_layout(&output, "out_stage0", "[4, 8] [B] on [0]", &["[4, 8]", "[0]"]);
    assert_layout(&output, "out_stage1", "[4, 3] [B] on [1]", &["[0]", "[4, 3]"]);
    let [x, w0, w1, out] = ["x", "w0", "w1", "out"].map(|name| matrix(&output, name));
    assert_close(&out, &product(&product(&x, &w0), &w1));
    assert_layout(&output, "w0.grad", "[5, 8] [B] on [0]", &["[5, 8]", "[0]"]);
    assert_layout(&output, "w1.grad", "[8, 3] [B] on [1]", &["[0]", "[8, 3]"]);
    let of_hidden = product(&ones(4, 3), &transposed(&w1));
    assert_close(&matrix(&output, "w0.grad"), &product(&transposed(&x), &of_hidden));
    let hidden = product(&x, &w0);
    assert_close(&matrix(&output, "w1.grad"), &product(&transposed(&hidden), &ones(4, 3)));
}

/// The losses are those of the two stages, one after the other, in this process. A third rank has
/// nothing to do.
#[test]
fn a_pipeline_of_two_stages_trains_as_one_process() {
    // The random numbers are those of the process.
    if runs_apart(a_pipeline_of_two_stages_trains_as_one_process, &[]) {
        return;
    }
    let output = launch(3, "global", &["pipeline"]);
    let losses: Vec<f64> =
        output.lines().filter_map(|line| line.split("loss:").nth(1)?.trim().parse().ok()).collect();
    let device = tch::Device::Cpu;
    tch::manual_seed(2);
    let x = Tensor::randn([16, 1, 28, 28], (Kind::Float, device));
    let y = Tensor::randint(10, [16], (Kind::Int64, device));
    let vs = nn::VarStore::new(device);
    let layer = |inputs, outputs| nn::linear(vs.root(), inputs, outputs, Default::default());
    tch::manual_seed(0);
    let first = layer(784, 512);
    tch::manual_seed(1);
    let (second, third) = (layer(512, 512), layer(512, 10));
    let mut optimizer = nn::Sgd::default().build(&vs, 1e-3).unwrap();
    assert_eq!(losses.len(), 20, "{output}");
    for found in losses {
        let hidden = second.forward(&first.forward(&x.flatten(1, -1)).relu()).relu();
        let loss = third.forward(&hidden).cross_entropy_for_logits(&y);
        assert!((loss.double_value(&[]) - found).abs() < 1e-4, "{found} instead of {loss}");
        optimizer.backward_step(&loss);
    }
}

#[test]
fn a_data_parallel_stage_and_a_model_parallel_one() {
    let output = launch(4, "global", &["hybrid"]);
    let locals = ["[2, 8]", "[2, 8]", "[0]", "[0]"];
    assert_layout(&output, "out_stage0", "[4, 8] [S(0)] on [0, 1]", &locals);
    let locals = ["[0]", "[0]", "[4, 2]", "[4, 1]"];
    assert_layout(&output, "out_stage1", "[4, 3] [S(1)] on [2, 3]", &locals);
    let [x, w0, w1, out] = ["x", "w0", "w1", "out"].map(|name| matrix(&output, name));
    assert_close(&out, &product(&product(&x, &w0), &w1));
}

#[test]
fn each_axis_of_a_mesh_has_an_sbp() {
    let output = launch(4, "global", &["mesh"]);
    let mesh = "on [[0, 1], [2, 3]]";
    assert_layout(&output, "out", &format!("[4, 8] [S(0), S(1)] {mesh}"), &["[2, 4]"; 4]);
    assert_layout(&output, "turned", &format!("[4, 8] [S(1), S(0)] {mesh}"), &["[2, 4]"; 4]);
    let [x, w, out, turned] = ["x", "w", "out", "turned"].map(|name| matrix(&output, name));
    assert_close(&out, &product(&x, &w));
    assert_close(&out, &turned);
}

#[test]
fn tensors_are_made_where_they_lie() {
    let output = launch(2, "global", &["creation"]);
    assert_layout(&output, "randn", "[4, 5] [S(0)] on [0, 1]", &["[2, 5]"; 2]);
    assert_layout(&output, "rows", "[3, 2] [S(0)] on [0, 1]", &["[2, 2]", "[1, 2]"]);
    assert_layout(&output, "columns", "[3, 2] [S(1)] on [0, 1]", &["[3, 1]"; 2]);
    assert_eq!(matrix(&output, "rows"), matrix(&output, "columns"));
    assert_layout(&output, "ones", "[2, 3] [P] on [0, 1]", &["[2, 3]"; 2]);
    assert_layout(&output, "full", "[2, 3] [S(1)] on [0, 1]", &["[2, 2]", "[2, 1]"]);
    assert_layout(&output, "arange", "[5] [S(0)] on [0, 1]", &["[3]", "[2]"]);
    assert_layout(&output, "tensor", "[2, 2] [S(0)] on [0, 1]", &["[1, 2]"; 2]);
    for (name, expected) in [
        ("zeros", [[0.0; 3]; 2].map(Vec::from).to_vec()),
        ("ones", [[1.0; 3]; 2].map(Vec::from).to_vec()),
        ("full", [[7.0; 3]; 2].map(Vec::from).to_vec()),
        ("tensor", vec![vec![1.0, 2.0], vec![3.0, 4.0]]),
        ("eye", [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]].map(Vec::from).to_vec()),
    ] {
        assert_eq!(matrix(&output, name), expected, "{name}");
    }
    assert!(output.contains("arange = [0.0, 1.0, 2.0, 3.0, 4.0]\n"), "{output}");
}

#[test]
fn tensors_get_another_sbp() {
    for ranks in [2, 4] {
        let output = launch(ranks, "global", &["to-global"]);
        let row = |first: u32| (first..first + 5).map(f64::from).collect::<Vec<_>>();
        let split: Matrix = [0, 5, 10, 15].map(row).to_vec();
        let copies = split[..2].to_vec();
        let sum = |at: usize| split[at].iter().zip(&split[at + 2]).map(|(x, y)| x + y).collect();
        let terms: Matrix = [0, 1].map(sum).to_vec();
        for (name, sbp, locals, expected) in [
            ("split", "[4, 5] [S(0)]", ["[2, 5]"; 2], &split),
            ("terms", "[2, 5] [P]", ["[2, 5]"; 2], &terms),
            ("copies", "[2, 5] [B]", ["[2, 5]"; 2], &copies),
            ("split to broadcast", "[4, 5] [B]", ["[4, 5]"; 2], &split),
            ("split to columns", "[4, 5] [S(1)]", ["[4, 3]", "[4, 2]"], &split),
            ("terms to broadcast", "[2, 5] [B]", ["[2, 5]"; 2], &terms),
            ("terms to split", "[2, 5] [S(0)]", ["[1, 5]"; 2], &terms),
            ("copies to split", "[2, 5] [S(1)]", ["[2, 3]", "[2, 2]"], &copies),
        ] {
            let [first, second] = locals;
            let locals = [first, second, "[0]", "[0]"];
            let name = format!("{name} ");
            let sbp = &format!("{sbp} on [0, 1]")[..];
            let is_of = |line: &&str| line.contains(&format!(": {name}{sbp}, here "));
            let mut lines: Vec<_> = output.lines().filter(is_of).collect();
            lines.sort_unstable();
            let ends = lines.iter().map(|line| line.split_once("here ").unwrap().1);
            assert_eq!(ends.collect::<Vec<_>>(), locals[..ranks], "{name}: {output}");
            assert_eq!(matrix(&output, name.trim()), *expected, "{name}");
        }
    }
}

/// What each rank has before and after, and what it took: lines of JSON.
#[test]
fn boxing_gives_each_rank_its_part() {
    let all = json!([[1, 2], [3, 4]]);
    let rows = [json!([[1, 2]]), json!([[3, 4]])];
    let columns = [json!([[1], [3]]), json!([[2], [4]])];
    let terms = [all.clone(), json!([[10, 20], [30, 40]])];
    let sum = json!([[11, 22], [33, 44]]);
    let copies = [all.clone(), all.clone()];
    let zeros = json!([[0, 0], [0, 0]]);
    let padded = [json!([[1, 2], [0, 0]]), json!([[0, 0], [3, 4]])];
    for ranks in [2, 4] {
        let output = launch(ranks, "global", &["boxing"]);
        let lines: Vec<Value> =
            output.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 14, "{output}");
        for (from, to, before, after, by, bytes) in [
            ("S(0)", "B", &rows, copies.clone(), "all-gather", 16),
            ("B", "S(0)", &copies, rows.clone(), "slice", 0),
            ("P", "B", &terms, [sum.clone(), sum.clone()], "all-reduce", 32),
            ("P", "S(0)", &terms, [json!([[11, 22]]), json!([[33, 44]])], "reduce-scatter", 16),
            ("S(0)", "S(1)", &rows, columns.clone(), "all-to-all", 8),
            ("S(0)", "P", &rows, padded.clone(), "to partial", 0),
            ("B", "P", &copies, [all.clone(), zeros.clone()], "to partial", 0),
        ] {
            for rank in 0..2 {
                let expected = json!({
                    "rank": rank, "from": from, "to": to, "before": before[rank], "after": after[rank], "by": [by], "bytes": bytes,
                });
                assert!(
                    lines.iter().any(|line| floats(line) == floats(&expected)),
                    "{expected}: {output}"
                );
            }
        }
    }
}

/// The same with all numbers in floating point.
fn floats(value: &Value) -> Value {
    match value {
        Value::Number(number) => json!(number.as_f64()),
        Value::Array(values) => values.iter().map(floats).collect(),
        Value::Object(fields) => {
            fields.iter().map(|(name, value)| (name.clone(), floats(value))).collect()
        }
        other => other.clone(),
    }
}

/// The losses of both ranks after 50 steps, and the weights, as in the documents.
#[test]
fn training_by_sbp_gives_the_documented_numbers() {
    for ranks in [2, 3] {
        let output = launch(ranks, "global", &["train"]);
        let losses = output.lines().filter_map(|line| line.strip_prefix("50/500 loss:"));
        let mut losses: Vec<f64> = losses.map(|loss| loss.parse().unwrap()).collect();
        losses.sort_by(f64::total_cmp);
        let documented = [0.000_253_364_152_740_687_13, 0.004_111_831_542_104_483];
        assert_eq!(losses.len(), 2, "{output}");
        for (loss, documented) in losses.iter().zip(documented) {
            assert!((loss / documented - 1.0).abs() < 1e-2, "{loss} {documented}");
        }
        let weights: Vec<Vec<f64>> = output
            .lines()
            .filter_map(|line| serde_json::from_str(line.strip_prefix("w:")?).ok())
            .collect();
        assert_eq!(weights.len(), ranks, "{output}");
        for w in weights {
            assert!((w[0] - 2.0).abs() < 1e-4 && (w[1] - 3.0).abs() < 1e-4, "{w:?}");
        }
    }
}

#[test]
fn too_few_ranks_are_an_error_with_both_numbers() {
    let finished = Process::start(launcher(2, &[], "global", &["hybrid"])).finish(TEST_TIMEOUT);
    let expected = "this program needs 4 ranks, and the job has 2";
    assert!(finished.stderr.contains(expected), "{}", finished.stderr);
    assert_eq!(finished.code, Some(1));
}
