//! Data parallel training by SBP: gradients of weights that are B go through a Ddp's buckets from the
//! second backward on, and are what one process would have.

use crate::common::ranks::{assert_close, ranks};
use flow_global::{
    B, GlobalTensor, P, Placement, S, Sbp, distribute, distribute_tensor, no_sync, randn,
};
use flow_tensor::{ProcessGroup, ReduceOp};
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};

const ROWS: i64 = 6;

/// Numbers that are the same on each call.
fn numbers(sizes: &[i64], factor: f64) -> Tensor {
    let count: i64 = sizes.iter().product();
    (Tensor::arange(count, (Kind::Double, Device::Cpu)) * factor).sin().view(sizes)
}

/// Two layers, the second of which may be left out, with known weights.
struct Net {
    vs: VarStore,
    first: nn::Linear,
    second: nn::Linear,
}

impl Net {
    fn new() -> Self {
        let mut vs = VarStore::new(Device::Cpu);
        let first = nn::linear(vs.root() / "first", 4, 4, Default::default());
        let second = nn::linear(vs.root() / "second", 4, 4, Default::default());
        vs.double();
        for (name, mut variable) in vs.variables() {
            let factor = 0.3 + name.len() as f64 / 10.0;
            tch::no_grad(|| variable.copy_(&numbers(&variable.size(), factor)));
        }
        Self { vs, first, second }
    }

    fn on(placement: &Placement, sbp: &[Sbp]) -> Self {
        let net = Self::new();
        distribute(&net.vs, placement, |_, _| sbp.to_vec()).unwrap();
        net
    }

    fn loss(&self, x: &Tensor, has_second: bool) -> Tensor {
        let hidden = self.first.forward(x).tanh();
        let y = if has_second { self.second.forward(&hidden) } else { hidden };
        y.square().sum(Kind::Double)
    }

    fn weights(&self) -> [&Tensor; 4] {
        let [first, second] = [&self.first, &self.second];
        [&first.ws, first.bs.as_ref().unwrap(), &second.ws, second.bs.as_ref().unwrap()]
    }

    fn zero_grad(&self) {
        for mut weight in self.weights().map(Tensor::shallow_clone) {
            weight.zero_grad();
        }
    }
}

fn batch(placement: &Placement, step: i64) -> (Tensor, Tensor) {
    let x = numbers(&[ROWS, 4], 0.7 + step as f64);
    let data: Vec<Sbp> = (0..placement.axes()).map(|axis| [S(0), B][axis]).collect();
    (x.shallow_clone(), distribute_tensor(&x, placement, data).unwrap())
}

fn assert_alike(net: &Net, plain: &Net) {
    for (global, plain) in net.weights().into_iter().zip(plain.weights()) {
        assert_eq!(global.grad().defined(), plain.grad().defined());
        if plain.grad().defined() {
            assert_eq!(global.grad().sbp().unwrap(), global.sbp().unwrap());
            assert_close(&global.grad().full().unwrap(), &plain.grad(), 1e-12);
        }
    }
}

/// Placements, and SBPs of the weights on them.
fn layouts(group: &ProcessGroup) -> Vec<(Placement, Vec<Sbp>)> {
    let line = |ranks: Vec<usize>| Placement::new(group, ranks).unwrap();
    let mesh = Placement::new(group, [[0, 1], [2, 3]]).unwrap();
    vec![
        (line(vec![0, 1, 2, 3]), vec![B]),
        (line(vec![3, 0, 2]), vec![B]),
        (mesh.clone(), vec![B, B]),
        (mesh, vec![B, S(0)]),
    ]
}

#[test]
fn gradients_are_those_of_one_process() {
    ranks(4, |group| {
        for (placement, sbp) in layouts(&group) {
            let (net, plain) = (Net::on(&placement, &sbp), Net::new());
            for step in 0..6 {
                let (x, global) = batch(&placement, step);
                // In the fourth step a layer gets no gradient; the fifth adds to it.
                let has_second = step != 3;
                if step != 4 {
                    net.zero_grad();
                    plain.zero_grad();
                }
                plain.loss(&x, has_second).backward();
                net.loss(&global, has_second).backward();
                assert_alike(&net, &plain);
            }
        }
    });
}

/// Several backwards, whose gradients are reduced at the end; then ordinary ones again.
#[test]
fn gradients_may_be_reduced_once_for_several_backwards() {
    ranks(4, |group| {
        let mut was_partial = false;
        for (placement, sbp) in layouts(&group) {
            let (net, plain) = (Net::on(&placement, &sbp), Net::new());
            for step in 0..6 {
                net.zero_grad();
                plain.zero_grad();
                let once = (step % 3 != 2).then(|| no_sync(&placement).unwrap());
                for part in 0..3 {
                    let (x, global) = batch(&placement, 3 * step + part);
                    // The second layer is not in the last backward.
                    plain.loss(&x, part != 2).backward();
                    net.loss(&global, part != 2).backward();
                }
                if let Some(once) = once {
                    was_partial |= net.first.ws.grad().sbp().unwrap().contains(&P);
                    once.finish().unwrap();
                }
                assert_alike(&net, &plain);
            }
        }
        assert!(was_partial, "each backward reduced its gradients");
    });
}

#[test]
fn a_backward_that_returns_gradients_leaves_those_of_leaves_alone() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let (net, plain) = (Net::on(&placement, &[B]), Net::new());
        for step in 0..3 {
            let (x, global) = batch(&placement, step);
            plain.loss(&x, true).backward();
            net.loss(&global, true).backward();
            let gradients = |net: &Net, x: &Tensor| {
                Tensor::run_backward(&[net.loss(x, true)], &net.weights(), false, false)
            };
            for (got, wanted) in gradients(&net, &global).iter().zip(gradients(&plain, &x)) {
                assert_close(&got.full().unwrap(), &wanted, 1e-12);
            }
            assert_alike(&net, &plain);
        }
    });
}

#[test]
fn leaves_that_get_one_gradient_have_each_their_own() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let vs = VarStore::new(Device::Cpu);
        let one = vs.root().var("one", &[3, 4], nn::Init::Const(1.0));
        let other = vs.root().var("other", &[3, 4], nn::Init::Const(2.0));
        distribute(&vs, &placement, |_, _| [B]).unwrap();
        for _ in 0..3 {
            let mut leaves = [one.shallow_clone(), other.shallow_clone()];
            leaves.iter_mut().for_each(Tensor::zero_grad);
            let x = randn([6, 3], Kind::Float, &placement, [S(0)]).unwrap();
            x.matmul(&(&one + &other)).square().sum(Kind::Float).backward();
            let before = other.grad().full().unwrap();
            assert_close(&one.grad().full().unwrap(), &before, 0.0);
            let _ = one.grad().g_mul_scalar_(2.0);
            assert_close(&other.grad().full().unwrap(), &before, 0.0);
        }
    });
}

#[test]
fn a_split_leaf_that_some_ranks_have_nothing_of_is_reduced_alike_on_all() {
    ranks(4, |group| {
        let mesh = Placement::new(&group, [[0, 1], [2, 3]]).unwrap();
        let vs = VarStore::new(Device::Cpu);
        let row = vs.root().var("row", &[1, 4], nn::Init::Const(1.0));
        distribute(&vs, &mesh, |_, _| [S(0), B]).unwrap();
        for step in 0..3 {
            let x = numbers(&[8, 4], 0.3 + f64::from(step)).to_kind(Kind::Float);
            let mut leaf = row.shallow_clone();
            leaf.zero_grad();
            (distribute_tensor(&x, &mesh, [S(0), S(0)]).unwrap() * &row)
                .sum(Kind::Float)
                .backward();
            let wanted = x.sum_dim_intlist([0i64].as_slice(), true, Kind::Float);
            assert_close(&row.grad().full().unwrap(), &wanted, 1e-5);
        }
    });
}

#[test]
fn gradients_of_gradients_go_through_conversions() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let other = Placement::new(&group, [1, 0]).unwrap();
        let plain = numbers(&[4, 4], 0.9).set_requires_grad(true);
        let second = |w: &Tensor, y: Tensor| {
            let first =
                Tensor::run_backward(&[y.pow_tensor_scalar(3).sum(Kind::Double)], &[w], true, true);
            let penalty = first[0].square().sum(Kind::Double);
            Tensor::run_backward(&[penalty], &[w], false, false).remove(0)
        };
        let wanted = second(&plain, plain.tanh());
        let w = || {
            distribute_tensor(&plain.detach(), &placement, [S(0)]).unwrap().set_requires_grad(true)
        };
        let converted: [fn(&Tensor, &Placement, &Placement) -> Tensor; 3] = [
            |x, _, _| x.grad_sbp([S(1)]).unwrap(),
            |x, own, other| x.to_global(other, [S(1)]).unwrap().to_global(own, [B]).unwrap(),
            |x, own, _| {
                flow_global::from_local(&x.to_local().unwrap(), [4, 4], own, [S(0)]).unwrap()
            },
        ];
        for convert in converted {
            let w = w();
            let got = second(&w, convert(&w.tanh(), &placement, &other));
            assert_close(&got.full().unwrap(), &wanted, 1e-12);
        }
    });
}

#[test]
fn a_tensor_of_any_reduction_has_its_values() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let minus = Tensor::full([3], -1.5, (Kind::Double, Device::Cpu));
        for op in [ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg, ReduceOp::Sum] {
            let sbp = [Sbp::Partial(op)];
            let made = flow_global::full([3], -1.5, Kind::Double, &placement, sbp).unwrap();
            assert_close(&made.full().unwrap(), &minus, 0.0);
            let distributed = distribute_tensor(&minus, &placement, sbp).unwrap();
            assert_close(&distributed.full().unwrap(), &minus, 0.0);
        }
        assert_eq!(P, Sbp::Partial(ReduceOp::Sum));
    });
}
