//! Layers that pin themselves, beside plain ones, forward and backward.

use std::collections::HashMap;

use crate::common::ranks::{assert_close, ranks};
use flow_global::nn::{
    ColumnLinear, RowLinear, column_linear, parallel_cross_entropy, row_linear, vocab_embedding,
};
use flow_global::{B, GlobalTensor, Placement, S, Sbp, distribute_tensor, record};
use tch::nn::Module;
use tch::{Device, Kind, Reduction, Tensor, nn};

const EXACT: f64 = 1e-12;

fn store() -> nn::VarStore {
    let mut vs = nn::VarStore::new(Device::Cpu);
    vs.set_kind(Kind::Double);
    vs
}

/// In the same order on all ranks.
fn variables(vs: &nn::VarStore) -> Vec<(String, Tensor)> {
    let mut variables: Vec<_> = vs.variables().into_iter().collect();
    variables.sort_by(|(one, _), (other, _)| one.cmp(other));
    variables
}

/// Runs `body`, and returns how many bytes a rank has received for it, on average.
fn received<T>(body: impl FnOnce() -> T) -> (T, f64) {
    let (result, trace) = record(body);
    let boxings = trace.calls.iter().flat_map(|call| trace.boxings(call));
    (result, boxings.map(|boxing| boxing.bytes).sum())
}

/// What a rank receives for an all-reduce of so many elements.
fn all_reduced(ranks: f64, elements: f64) -> f64 {
    2.0 * (ranks - 1.0) / ranks * elements * 8.0
}

#[track_caller]
fn assert_close_bytes(one: f64, other: f64) {
    assert!((one - other).abs() < 1.0, "{one} and {other} bytes");
}

/// Numbers that are the same on all ranks.
fn numbers(sizes: &[i64], seed: i64) -> Tensor {
    let count: i64 = sizes.iter().product();
    let index = Tensor::arange(count, (Kind::Double, Device::Cpu));
    ((index * 12.9898 + seed) * 78.233).sin().view(sizes)
}

fn leaf(tensor: &Tensor) -> Tensor {
    tensor.detach().copy().set_requires_grad(true)
}

fn full_leaf(tensor: &Tensor) -> Tensor {
    leaf(&tensor.full().unwrap())
}

#[track_caller]
fn assert_same_gradient(global: &Tensor, plain: &Tensor) {
    assert_close(&global.grad().full().unwrap(), &plain.grad(), EXACT);
}

/// On one axis of two and three ranks, and on the second one of a mesh whose first has a split batch.
/// Sizes are no multiples of the numbers of ranks.
#[test]
fn a_column_and_a_row_layer_are_two_plain_ones() {
    for (size, axis, batch) in [(2, 0, 5), (3, 0, 5), (4, 1, 6), (4, 1, 5)] {
        ranks(size, |group| {
            let all: Vec<usize> = (0..size).collect();
            let placement = match axis {
                0 => Placement::new(&group, all).unwrap(),
                _ => Placement::new(&group, [[0, 1], [2, 3]]).unwrap(),
            };
            let vs = store();
            let column =
                column_linear(vs.root() / "a", 5, 7, &placement, axis, Default::default()).unwrap();
            let row =
                row_linear(vs.root() / "b", 7, 3, &placement, axis, Default::default()).unwrap();
            let mut sbp = vec![B; placement.axes()];
            if axis == 1 {
                sbp[0] = S(0);
            }
            let plain_x = leaf(&numbers(&[batch, 4, 5], 1));
            let x = distribute_tensor(&plain_x.detach(), &placement, &sbp)
                .unwrap()
                .set_requires_grad(true);
            let hidden = column.forward(&x);
            // A batch that is split unevenly is boxed where samples and positions become rows.
            if (axis, batch) != (1, 5) {
                assert_eq!(hidden.sbp().unwrap()[axis], S(2));
            }
            let out = row.forward(&hidden.gelu("none"));
            assert_eq!(out.sbp().unwrap()[axis], B);
            let weights = numbers(&[batch, 4, 3], 2);
            let loss = (&out * &weights).sum(Kind::Double);
            loss.backward();

            let [w0, w1] = [&column.ws, &row.ws].map(full_leaf);
            let [b0, b1] = [&column.bs, &row.bs].map(|bias| full_leaf(bias.as_ref().unwrap()));
            let plain = plain_x.linear(&w0, Some(&b0)).gelu("none").linear(&w1, Some(&b1));
            (&plain * &weights).sum(Kind::Double).backward();
            assert_close(&out.full().unwrap(), &plain, EXACT);
            assert_same_gradient(&x, &plain_x);
            assert_same_gradient(&column.ws, &w0);
            assert_same_gradient(&row.ws, &w1);
            assert_same_gradient(column.bs.as_ref().unwrap(), &b0);
            assert_same_gradient(row.bs.as_ref().unwrap(), &b1);
        });
    }
}

/// Also with fewer rows than ranks.
#[test]
fn an_embedding_of_a_split_vocabulary_is_a_plain_one() {
    for (vocabulary, size) in [(10, 2), (10, 3), (2, 3)] {
        ranks(size, |group| {
            let placement = Placement::all(&group).unwrap();
            let vs = store();
            let init = nn::Init::Randn { mean: 0.0, stdev: 1.0 };
            let layer = vocab_embedding(vs.root(), vocabulary, 4, &placement, 0, init).unwrap();
            let indices = Tensor::from_slice(&[0i64, 1, 1, 0, 1, 0]) * (vocabulary - 1);
            let indices = indices.view([2, 3]);
            let out = layer.forward(&distribute_tensor(&indices, &placement, [B]).unwrap());
            assert_eq!(out.sbp().unwrap(), [B]);
            let weights = numbers(&[2, 3, 4], 3);
            (&out * &weights).sum(Kind::Double).backward();
            if vocabulary >= size as i64 {
                assert_eq!(layer.ws.grad().sbp().unwrap(), [S(0)]);
            }

            let plain_weight = full_leaf(&layer.ws);
            let plain = Tensor::embedding(&plain_weight, &indices, -1, false, false);
            (&plain * &weights).sum(Kind::Double).backward();
            assert_close(&out.full().unwrap(), &plain, EXACT);
            assert_same_gradient(&layer.ws, &plain_weight);
        });
    }
}

/// As in libtorch, on each rank.
#[test]
fn an_index_that_is_no_row_is_an_error() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let vs = store();
        let init = nn::Init::Const(1.0);
        let layer = vocab_embedding(vs.root(), 5, 4, &placement, 0, init).unwrap();
        for (index, words) in [(5_i64, "index 5 is no row"), (-1, "index -1 is no row")] {
            let indices =
                distribute_tensor(&Tensor::from_slice(&[0, index]), &placement, [B]).unwrap();
            let error = layer.f_forward(&indices).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
            let error = Tensor::f_embedding(&layer.ws, &indices, -1, false, false).unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
    });
}

/// Also with fewer classes than ranks, samples that are split on another axis, and samples that do
/// not count.
#[test]
fn cross_entropy_of_split_classes_is_that_of_whole_ones() {
    let cases: [(usize, i64, &[Sbp]); 5] =
        [(2, 9, &[S(2)]), (3, 7, &[S(2)]), (3, 2, &[S(2)]), (2, 9, &[B]), (4, 9, &[S(0), S(2)])];
    for (size, classes, sbp) in cases {
        ranks(size, |group| {
            let placement = match sbp.len() {
                1 => Placement::all(&group).unwrap(),
                _ => Placement::new(&group, [[0, 1], [2, 3]]).unwrap(),
            };
            let values = numbers(&[3, 2, classes], 4) * 30;
            let target = Tensor::from_slice(&[0, classes - 1, 1, -100, 0, 1]).view([3, 2]);
            let logits =
                distribute_tensor(&values, &placement, sbp).unwrap().set_requires_grad(true);
            let of_target: Vec<Sbp> =
                sbp.iter().map(|&sbp| if sbp == S(0) { sbp } else { B }).collect();
            let global_target = distribute_tensor(&target, &placement, &of_target).unwrap();
            let (losses, forward) =
                received(|| parallel_cross_entropy(&logits, &global_target).unwrap());
            let ((), backward) = received(|| losses.sum(Kind::Double).backward());

            let plain = leaf(&values);
            let expected = plain.view([6, classes]).cross_entropy_loss::<Tensor>(
                &target.view([6]),
                None,
                Reduction::None,
                -100,
                0.0,
            );
            expected.sum(Kind::Double).backward();
            assert_close(&losses.full().unwrap(), &expected.view([3, 2]), EXACT);
            assert_same_gradient(&logits, &plain);
            // Three numbers a sample, all-reduced between the ranks that split the classes.
            let (split, samples) = match sbp {
                [B] => (1.0, 6.0),
                [_] => (size as f64, 6.0),
                // Of two groups, one has four samples, the other two.
                _ => (2.0, 3.0),
            };
            assert_close_bytes(forward, all_reduced(split, 3.0 * samples));
            // Of the sum of the losses, numbers are reduced; no logits are.
            assert!(backward <= all_reduced(size as f64, 2.0), "{backward}");
        });
    }
}

/// A block of a transformer.
struct Block {
    norms: [nn::LayerNorm; 2],
    qkv: ColumnLinear,
    out: RowLinear,
    up: ColumnLinear,
    down: RowLinear,
    heads: i64,
}

/// Queries, keys and values of a head are side by side, so that heads can be split.
fn attention(qkv: &Tensor, heads: i64) -> Tensor {
    let (samples, length, width) = qkv.size3().unwrap();
    let of_head = width / heads / 3;
    let qkv = qkv.view([samples, length, heads, 3 * of_head]).transpose(1, 2).chunk(3, -1);
    let all = Tensor::scaled_dot_product_attention::<Tensor>(
        &qkv[0], &qkv[1], &qkv[2], None, 0.0, true, None, false,
    );
    all.transpose(1, 2).reshape([samples, length, heads * of_head])
}

impl Block {
    fn new(path: &nn::Path, width: i64, heads: i64, placement: &Placement) -> Self {
        let column = |name: &str, outputs: i64| {
            column_linear(path / name, width, outputs, placement, 0, Default::default()).unwrap()
        };
        let row = |name: &str, inputs: i64| {
            row_linear(path / name, inputs, width, placement, 0, Default::default()).unwrap()
        };
        let norm = |name: &str| nn::layer_norm(path / name, vec![width], Default::default());
        Self {
            norms: [norm("norm0"), norm("norm1")],
            qkv: column("qkv", 3 * width),
            out: row("out", width),
            up: column("up", 4 * width),
            down: row("down", 4 * width),
            heads,
        }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let x = x + self
            .out
            .forward(&attention(&self.qkv.forward(&self.norms[0].forward(x)), self.heads));
        let hidden = self.up.forward(&self.norms[1].forward(&x)).gelu("none");
        &x + self.down.forward(&hidden)
    }

    /// The same computation on one rank, with these variables by name.
    fn plain(variables: &dyn Fn(&str) -> Tensor, x: &Tensor, width: i64, heads: i64) -> Tensor {
        let linear = |name: &str, x: &Tensor| {
            let bias = variables(&format!("{name}.bias"));
            x.linear(&variables(&format!("{name}.weight")), Some(&bias))
        };
        let norm = |name: &str, x: &Tensor| {
            let (weight, bias) =
                (variables(&format!("{name}.weight")), variables(&format!("{name}.bias")));
            x.layer_norm([width], Some(&weight), Some(&bias), 1e-5, true)
        };
        let x = x + linear("out", &attention(&linear("qkv", &norm("norm0", x)), heads));
        &x + linear("down", &linear("up", &norm("norm1", &x)).gelu("none"))
    }
}

/// Two all-reduces of the activations forward, two backward, and nothing else.
#[test]
fn a_tensor_parallel_block_moves_as_many_bytes_as_megatron() {
    const SAMPLES: i64 = 3;
    const LENGTH: i64 = 5;
    const WIDTH: i64 = 16;
    const HEADS: i64 = 4;
    for size in [2, 4] {
        ranks(size, |group| {
            let placement = Placement::all(&group).unwrap();
            let vs = store();
            let block = Block::new(&vs.root(), WIDTH, HEADS, &placement);
            for (name, variable) in &mut variables(&vs) {
                // The layers' own are global already; these are the same on all ranks.
                if name.starts_with("norm") {
                    flow_global::to_global_in_place(variable, &placement, [B]).unwrap();
                }
            }
            let values = numbers(&[SAMPLES, LENGTH, WIDTH], 5);
            let x = distribute_tensor(&values, &placement, [B]).unwrap().set_requires_grad(true);
            let weights =
                distribute_tensor(&numbers(&[SAMPLES, LENGTH, WIDTH], 6), &placement, [B]).unwrap();
            let (out, forward) = received(|| block.forward(&x));
            let ((), backward) = received(|| (&out * &weights).sum(Kind::Double).backward());
            let activations = all_reduced(size as f64, (SAMPLES * LENGTH * WIDTH) as f64);
            assert_close_bytes(forward, 2.0 * activations);
            assert_close_bytes(backward, 2.0 * activations);

            let copy = |(name, variable): (String, Tensor)| (name, full_leaf(&variable));
            let plain: HashMap<String, Tensor> = variables(&vs).into_iter().map(copy).collect();
            let plain_x = leaf(&values);
            let find = |name: &str| plain[name].shallow_clone();
            let expected = Block::plain(&find, &plain_x, WIDTH, HEADS);
            (&expected * weights.full().unwrap()).sum(Kind::Double).backward();
            assert_close(&out.full().unwrap(), &expected, EXACT);
            assert_same_gradient(&x, &plain_x);
            for (name, variable) in variables(&vs) {
                assert_same_gradient(&variable, &plain[&name]);
            }
        });
    }
}

#[test]
fn layers_on_some_of_the_ranks() {
    ranks(3, |group| {
        let placement = Placement::new(&group, [0, 2]).unwrap();
        let vs = store();
        let path = vs.root();
        let init = nn::Init::Randn { mean: 0.0, stdev: 1.0 };
        let embedding = vocab_embedding(&path / "e", 7, 4, &placement, 0, init).unwrap();
        let head = column_linear(&path / "h", 4, 7, &placement, 0, Default::default()).unwrap();
        let tokens = Tensor::from_slice(&[6i64, 0, 3]);
        let target = distribute_tensor(&tokens, &placement, [B]).unwrap();
        let logits = head.forward(&embedding.forward(&target));
        let losses = parallel_cross_entropy(&logits, &target).unwrap();
        assert_eq!(losses.size(), [3]);
        losses.sum(Kind::Double).backward();
        let [w0, w1, b1] = [&embedding.ws, &head.ws, head.bs.as_ref().unwrap()].map(full_leaf);
        let hidden = Tensor::embedding(&w0, &tokens, -1, false, false);
        let expected = hidden.linear(&w1, Some(&b1)).cross_entropy_loss::<Tensor>(
            &tokens,
            None,
            Reduction::None,
            -100,
            0.0,
        );
        expected.sum(Kind::Double).backward();
        assert_close(&losses.full().unwrap(), &expected, EXACT);
        assert_same_gradient(&embedding.ws, &w0);
        assert_same_gradient(&head.ws, &w1);
    });
}

#[test]
fn what_does_not_fit_is_an_error() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let vs = store();
        let error = column_linear(vs.root(), 2, 2, &placement, 1, Default::default()).unwrap_err();
        assert!(error.to_string().contains("the placement [0, 1] has no axis 1"), "{error}");
        let row = row_linear(vs.root(), 2, 2, &placement, 0, Default::default()).unwrap();
        let error = row.f_forward(&Tensor::zeros([2, 2], (Kind::Double, Device::Cpu))).unwrap_err();
        assert!(error.to_string().contains("make it global by to_global"), "{error}");
        let logits = flow_global::zeros([2, 3], Kind::Double, &placement, [S(1)]).unwrap();
        let target = flow_global::zeros([3], Kind::Int64, &placement, [B]).unwrap();
        let error = parallel_cross_entropy(&logits, &target).unwrap_err().to_string();
        assert!(error.contains("[2, 3] need targets of the same shape"), "{error}");
    });
}

/// Sequence parallelism: what lies between the layers is split by tokens, and as many bytes are moved
/// as without.
#[test]
fn tokens_are_split_between_a_row_and_a_column_layer() {
    for (size, mesh) in [(2, vec![vec![0, 1]]), (4, vec![vec![0, 1], vec![2, 3]])] {
        ranks(size, |group| {
            let placement = Placement::new(&group, mesh.clone()).unwrap();
            let vs = store();
            let embedding =
                vocab_embedding(vs.root() / "e", 9, 6, &placement, 1, nn::Init::Const(0.0))
                    .unwrap();
            let embedding = embedding.scattered(1);
            let column =
                column_linear(vs.root() / "a", 6, 8, &placement, 1, Default::default()).unwrap();
            let row = row_linear(vs.root() / "b", 8, 6, &placement, 1, Default::default()).unwrap();
            let row = row.scattered(1);
            for (index, (_, mut variable)) in variables(&vs).into_iter().enumerate() {
                let values = numbers(&variable.size(), index as i64);
                tch::no_grad(|| variable.copy_(&values));
            }
            let plain: HashMap<String, Tensor> = variables(&vs)
                .into_iter()
                .map(|(name, tensor)| (name, full_leaf(&tensor)))
                .collect();
            let linear = |x: &Tensor, name: &str| {
                x.linear(&plain[&format!("{name}.weight")], Some(&plain[&format!("{name}.bias")]))
            };
            let indices = (numbers(&[4, 5], 3) * 4.4 + 4.4).to_kind(Kind::Int64);
            let x = Tensor::embedding(&plain["e.weight"], &indices, -1, false, false);
            let expected = (&x + linear(&linear(&x, "a").tanh(), "b").tanh()).square();
            expected.sum(Kind::Double).backward();
            let indices = distribute_tensor(&indices, &placement, [S(0), B]).unwrap();
            let (output, bytes) = received(|| {
                let x = embedding.f_forward(&indices).unwrap();
                assert_eq!(x.sbp().unwrap(), [S(0), S(1)]);
                let y = row.f_forward(&column.f_forward(&x).unwrap().tanh()).unwrap();
                assert_eq!(y.sbp().unwrap(), [S(0), S(1)]);
                let output = (x + y.tanh()).square();
                output.sum(Kind::Double).backward();
                output
            });
            assert_close(&output.full().unwrap(), &expected, EXACT);
            for (name, variable) in variables(&vs) {
                assert_same_gradient(&variable, &plain[&name]);
            }
            if size == 2 {
                // A reduce-scatter and a gather each, forward and backward, of the layers' results
                // and of their input; the embedding's result; the bias of the row layer.
                assert_close_bytes(
                    bytes,
                    3.0 * all_reduced(2.0, 4.0 * 5.0 * 6.0) + all_reduced(2.0, 6.0),
                );
            }
        });
    }
}
