//! What OneFlow's global tensors can do, and what is said where something does not fit.

use std::collections::HashMap;

use crate::common::ranks::{assert_close, ranks};
use flow_global as global;
use flow_global::{B, GlobalTensor, P, Placement, S, Sbp};
use flow_tensor::ReduceOp;
use tch::{Device, Kind, Tensor, nn};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

#[test]
fn tensors_like_others() {
    ranks(3, |group| {
        let placement = Placement::new(&group, [2, 0]).unwrap();
        let plain = Tensor::zeros([3, 5], F32);
        let product = Sbp::Partial(ReduceOp::Product);
        let twos = Tensor::full([3, 5], 2, (Kind::Int64, Device::Cpu));
        let tensors = [
            (global::zeros_like(&plain, &placement, [S(0)]).unwrap(), Some(0.0)),
            (global::ones_like(&plain, &placement, [P]).unwrap(), Some(1.0)),
            (global::full_like(&plain, 7.0, &placement, [S(1)]).unwrap(), Some(7.0)),
            (global::empty_like(&plain, &placement, vec![B]).unwrap(), None),
            (global::rand_like(&plain, &placement, [S(0)]).unwrap(), None),
            (global::randn_like(&plain, &placement, [S(0)]).unwrap(), None),
            (global::randint_like(&plain, 4, 5, &placement, [P]).unwrap(), Some(4.0)),
            (global::new_zeros(&plain, [3, 5], &placement, [S(0)]).unwrap(), Some(0.0)),
            (global::new_ones(&plain, [3, 5], &placement, [product]).unwrap(), Some(1.0)),
            (global::new_full(&plain, [3, 5], 7.0, &placement, [product]).unwrap(), Some(7.0)),
            (global::new_empty(&plain, [3, 5], &placement, [B]).unwrap(), None),
            (global::new_tensor(&plain, &twos, &placement, [S(1)]).unwrap(), Some(2.0)),
        ];
        for (tensor, value) in tensors {
            assert!(tensor.is_global());
            assert_eq!((tensor.size(), tensor.kind()), (vec![3, 5], Kind::Float));
            assert_eq!(tensor.placement().unwrap(), placement);
            let full = tensor.full().unwrap();
            if let Some(value) = value {
                assert_close(&full, &Tensor::full([3, 5], value, F32), 0.0);
            }
        }
        // Of the same seed, the same numbers, however they lie.
        global::manual_seed(&placement, 3).unwrap();
        let standard = global::randn([3, 5], Kind::Float, &placement, [S(0)]).unwrap();
        global::manual_seed(&placement, 3).unwrap();
        let normal = global::normal(2.0, 10.0, [3, 5], Kind::Float, &placement, [S(1)]).unwrap();
        let expected = standard.full().unwrap() * 10 + 2;
        assert_close(&normal.full().unwrap(), &expected, 1e-4);
    });
}

#[test]
fn tensors_in_containers() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let plain = |value: f64| Tensor::full([2, 3], value, F32);
        let values: HashMap<String, (Vec<Tensor>, Option<Tensor>)> = HashMap::from([
            ("one".to_owned(), (vec![plain(1.0), plain(2.0)], None)),
            ("two".to_owned(), (Vec::new(), Some(plain(3.0)))),
        ]);
        let globals =
            global::to_global(&values, &placement, |tensor| [S(tensor.dim() - 1)]).unwrap();
        let (list, none) = &globals["one"];
        assert!(none.is_none());
        assert_eq!(list[1].size(), [2, 6]);
        assert_close(&list[1].full().unwrap(), &Tensor::full([2, 6], 2.0, F32), 0.0);
        let locals = global::to_local(&globals).unwrap();
        assert_close(locals["two"].1.as_ref().unwrap(), &plain(3.0), 0.0);
        assert!(!locals["two"].1.as_ref().unwrap().is_global());
    });
}

#[test]
fn locals_whose_sizes_are_known() {
    ranks(3, |group| {
        let placement = Placement::new(&group, [0, 2]).unwrap();
        let rows = if group.rank() == 0 { 3 } else { 2 };
        let local = Tensor::full([rows, 2], group.rank() as f64, F32).set_requires_grad(true);
        let tensor = global::from_local(&local, [5, 2], &placement, [S(0)]).unwrap();
        assert_eq!(tensor.size(), [5, 2]);
        (&tensor * 3.0).sum(Kind::Float).backward();
        let is_inside = group.rank() != 1;
        let expected = local.full_like(if is_inside { 3.0 } else { 0.0 }).detach();
        assert_close(&local.grad(), &expected, 0.0);
        let full = tensor.full().unwrap();
        assert_eq!((full.double_value(&[2, 0]), full.double_value(&[3, 0])), (0.0, 2.0));
        // As large as the logical tensor; so not this rank's part, except on the rank outside.
        let error = global::from_local(&full, [5, 2], &placement, [S(0)]);
        if is_inside {
            let error = error.unwrap_err().to_string();
            assert!(error.contains("has a tensor of shape [5, 2]"), "{error}");
        } else {
            assert_eq!(error.unwrap().size(), [5, 2])
        }
    });
}

/// Modules become global, buffers and shared parameters too, and optimizers go on.
#[test]
fn a_model_becomes_global() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let vs = nn::VarStore::new(Device::Cpu);
        let norm = nn::batch_norm1d(vs.root() / "norm", 4, Default::default());
        let linear = nn::linear(vs.root() / "linear", 4, 4, Default::default());
        let shared = linear.ws.shallow_clone();
        global::distribute(&vs, &placement, |name, tensor| match (name, tensor.dim()) {
            (_, 2) => [S(0)],
            _ => [B],
        })
        .unwrap();
        assert!(norm.running_mean.is_global());
        assert_eq!(shared.sbp().unwrap(), [S(0)]);
        assert_eq!(shared.to_local().unwrap().size(), [2, 4]);
    });
}

/// A tensor gets another SBP, or another placement, or neither.
#[test]
fn one_of_placement_and_sbp() {
    ranks(3, |group| {
        let placement = Placement::new(&group, [0, 1]).unwrap();
        let other = Placement::new(&group, [2, 0]).unwrap();
        let x = global::randn([4, 6], Kind::Float, &placement, [S(0)]).unwrap();
        let columns = x.to_sbp([S(1)]).unwrap();
        assert_eq!(columns.sbp().unwrap(), [S(1)]);
        assert_eq!(columns.placement().unwrap(), placement);
        let there = x.to_placement(&other).unwrap();
        assert_eq!(there.sbp().unwrap(), [S(0)]);
        assert_eq!(there.placement().unwrap(), other);
        for y in [&columns, &there] {
            assert_close(&y.full().unwrap(), &x.full().unwrap(), 0.0);
        }
        let mesh = Placement::new(&group, [[0], [1]]).unwrap();
        assert!(message(x.to_placement(&mesh)).contains("has 2 axes, but 1 SBPs are given"));
        // The same placement and SBP: the same memory, and by copy() another one.
        let mut same = x.to_global(&placement, [S(0)]).unwrap();
        let mut copy = same.copy();
        let before = x.full().unwrap();
        let _ = copy.fill_(3.0);
        assert_close(&x.full().unwrap(), &before, 0.0);
        let _ = same.fill_(5.0);
        assert_close(&x.full().unwrap(), &Tensor::full([4, 6], 5.0, F32), 0.0);
        // A local's memory stays the local's own.
        let local = Tensor::zeros([2, 6], F32);
        for sbp in [S(0), B, P] {
            let _ = local.to_global(&placement, [sbp]).unwrap().fill_(1.0);
        }
        assert_close(&local, &Tensor::zeros([2, 6], F32), 0.0);
    });
}

/// `copy_` and `set_data` move by nature.
#[test]
fn assignments_between_placements() {
    ranks(4, |group| {
        let placement = Placement::new(&group, [0, 1]).unwrap();
        let mesh = Placement::new(&group, [[2, 1], [3, 0]]).unwrap();
        let plain = Tensor::arange(20, F32).view([4, 5]);
        let source = global::distribute_tensor(&plain, &placement, [S(0)]).unwrap();
        let source = source.set_requires_grad(true);
        for sbp in [[S(0), S(1)], [B, S(0)], [P, B]] {
            let mut target = global::zeros([4, 5], Kind::Float, &mesh, sbp).unwrap();
            target.copy_(&(&source * 2.0));
            assert_eq!(target.sbp().unwrap(), sbp);
            assert_eq!(target.placement().unwrap(), mesh);
            assert_close(&target.full().unwrap(), &(&plain * 2.0), 0.0);
            (target * 3.0).sum(Kind::Float).backward();
        }
        assert_eq!(source.grad().placement().unwrap(), placement);
        assert_close(&source.grad().full().unwrap(), &Tensor::full([4, 5], 18.0, F32), 0.0);
        // Of another size: broadcast.
        let mut rows = global::zeros([3, 5], Kind::Float, &mesh, [B, S(1)]).unwrap();
        rows.copy_(&source.detach().narrow(0, 1, 1));
        let expected = plain.narrow(0, 1, 1).expand([3, 5], false);
        assert_close(&rows.full().unwrap(), &expected, 0.0);

        let mut data = global::ones([2], Kind::Float, &mesh, [B, B]).unwrap();
        let holder = data.shallow_clone();
        data.set_data(&source.detach());
        assert_eq!((holder.size(), holder.sbp().unwrap()), (vec![4, 5], vec![S(0)]));
        assert_close(&holder.full().unwrap(), &plain, 0.0);
    });
}

/// A model that was made global is plain again, for all who hold its variables, and trains on.
#[test]
fn a_model_becomes_plain_again() {
    ranks(3, |group| {
        let placement = Placement::new(&group, [2, 1]).unwrap();
        let vs = nn::VarStore::new(Device::Cpu);
        let linear = nn::linear(vs.root(), 4, 5, Default::default());
        tch::no_grad(|| linear.ws.shallow_clone().copy_(&Tensor::arange(20, F32).view([5, 4])));
        global::distribute(&vs, &placement, |_, _| [S(0)]).unwrap();
        linear.ws.sum(Kind::Float).backward();
        global::undistribute(&vs).unwrap();
        assert!(!linear.ws.is_global() && !linear.ws.grad().is_global());
        assert_close(&linear.ws.detach(), &Tensor::arange(20, F32).view([5, 4]), 0.0);
        assert_close(&linear.ws.grad(), &Tensor::ones([5, 4], F32), 0.0);
        linear.ws.sum(Kind::Float).backward();
        assert_close(&linear.ws.grad(), &Tensor::full([5, 4], 2.0, F32), 0.0);
        // And once more global.
        global::distribute(&vs, &placement, |_, _| [B]).unwrap();
        assert_close(&linear.ws.full().unwrap(), &Tensor::arange(20, F32).view([5, 4]), 0.0);
        global::undistribute(&vs).unwrap();
    });
}

/// Operations that reduce a split dimension leave partial values of their own reduction.
#[test]
fn partial_results() {
    ranks(3, |group| {
        let placement = Placement::all(&group).unwrap();
        let plain = (Tensor::arange(21, F32).view([7, 3]) * 0.7).sin();
        let x = global::distribute_tensor(&plain, &placement, [S(0)]).unwrap();
        let (flags, plain_flags) = (x.gt(0.9), plain.gt(0.9));
        let cases: Vec<(Tensor, Tensor, ReduceOp)> = vec![
            (x.sum(Kind::Float), plain.sum(Kind::Float), ReduceOp::Sum),
            (x.mean(Kind::Float), plain.mean(Kind::Float), ReduceOp::Sum),
            (x.amax([0i64], false), plain.amax([0i64], false), ReduceOp::Max),
            (x.amin([0i64], true), plain.amin([0i64], true), ReduceOp::Min),
            (x.max(), plain.max(), ReduceOp::Max),
            (x.min(), plain.min(), ReduceOp::Min),
            (x.prod(Kind::Float), plain.prod(Kind::Float), ReduceOp::Product),
            (flags.any(), plain_flags.any(), ReduceOp::Max),
            (flags.all_dim(0, false), plain_flags.all_dim(0, false), ReduceOp::Min),
        ];
        for (found, expected, op) in cases {
            assert_eq!(found.sbp().unwrap(), [Sbp::Partial(op)]);
            let (found, expected) = (found.full().unwrap(), expected);
            assert_eq!(found.kind(), expected.kind());
            assert_close(&found.to_kind(Kind::Float), &expected.to_kind(Kind::Float), 1e-6);
        }
        assert_eq!(x.amax([1i64], false).sbp().unwrap(), [S(0)]);
    });
}

/// Whole numbers are exact, and half precision has all its numbers.
#[test]
fn random_numbers_use_all_bits() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        global::manual_seed(&placement, 5).unwrap();
        let ints = |low: i64, high: i64| {
            let x = global::randint(low, high, [500], Kind::Int64, &placement, [S(0)]).unwrap();
            Vec::<i64>::try_from(x.full().unwrap()).unwrap()
        };
        let large = ints(1 << 60, (1 << 60) + (1 << 40));
        assert!(large.iter().all(|&x| (1 << 60..(1 << 60) + (1 << 40)).contains(&x)));
        // f64 would have multiples of 256 only.
        assert!(large.iter().any(|x| x % 256 != 0));
        let all = ints(i64::MIN, i64::MAX);
        assert!(all.iter().any(|&x| x < 0) && all.iter().any(|&x| x > 1 << 62));
        let like = global::zeros([500], Kind::Int64, &placement, [S(0)]).unwrap();
        let like = like.randint_like_low_dtype(1 << 60, (1 << 60) + 512).full().unwrap();
        let like = Vec::<i64>::try_from(like).unwrap();
        assert!(like.iter().all(|&x| (1 << 60..(1 << 60) + 512).contains(&x)));
        assert!(like.iter().any(|x| x % 256 != 0));
        for (kind, steps) in [(Kind::Half, 2048.0), (Kind::BFloat16, 256.0)] {
            let x = global::rand([5000], kind, &placement, [S(0)]).unwrap().full().unwrap();
            let x = x.to_kind(Kind::Double);
            let mut values = Vec::<f64>::try_from(&x * steps).unwrap();
            assert!(values.iter().all(|x| x.fract() == 0.0 && (0.0..steps).contains(x)));
            values.sort_by(f64::total_cmp);
            values.dedup();
            assert!(values.len() as f64 > 0.8 * steps, "{kind:?}: {} values", values.len());
        }
    });
}

/// What is plain is written on all ranks, also on those outside the placement; and an `out` tensor gets
/// the size of the result.
#[test]
fn plain_and_resized_tensors_are_written() {
    ranks(3, |group| {
        let placement = Placement::new(&group, [2, 0]).unwrap();
        let value = Tensor::arange(12, F32).view([4, 3]);
        for sbp in [S(0), B, P] {
            let x = global::distribute_tensor(&value, &placement, [sbp]).unwrap();
            let mut plain = Tensor::ones([4, 3], F32);
            let _ = plain.g_add_(&x);
            assert!(!plain.is_global());
            assert_close(&plain, &(&value + 1.0), 0.0);
            let mut columns = Tensor::zeros([3, 4], F32).tr();
            columns.copy_(&x);
            assert_close(&columns, &value, 0.0);
            let _ = plain.bernoulli_(&x.ge(5.0).to_kind(Kind::Float));
            assert_close(&plain, &value.ge(5.0).to_kind(Kind::Float), 0.0);

            let expected = value.matmul(&value.tr());
            let plain_out = Tensor::zeros([2], F32);
            let _ = x.mm_out(&plain_out, &x.tr());
            assert_close(&plain_out, &expected, 1e-6);
            for of_out in [S(0), B, P] {
                let out = global::zeros([2], Kind::Float, &placement, [of_out]).unwrap();
                let _ = x.mm_out(&out, &x.tr());
                assert_eq!(out.size(), [4, 4]);
                assert_close(&out.full().unwrap(), &expected, 1e-6);
                assert_close(&(&out * 2.0).full().unwrap(), &(&expected * 2.0), 1e-6);
            }
            let mut x = x;
            for error in [x.f_resize_([2, 2]).unwrap_err(), x.f_resize_as_(&plain).unwrap_err()] {
                let error = error.to_string();
                assert!(error.contains("cannot be changed in place"), "{error}");
            }
        }
    });
}

/// Each says what was wrong.
#[test]
fn errors() {
    ranks(2, |group| {
        let placement = Placement::new(&group, [0, 1]).unwrap();
        let other = Placement::new(&group, [0]).unwrap();
        let x = global::ones([4, 5], Kind::Float, &placement, [S(0)]).unwrap();
        let plain = Tensor::ones([4, 5], F32);
        let uneven = Tensor::ones([1 + group.rank() as i64, 5], F32);
        let columns = Tensor::ones([2, 2 + 2 * group.rank() as i64], F32);
        let kind = if group.rank() == 0 { Kind::Float } else { Kind::Double };
        let on_other = global::ones([4, 5], Kind::Float, &other, [B]).unwrap();
        let cases: Vec<(String, &str)> = vec![
            (message(Placement::new(&group, [0, 5])), "has rank 5, but the group has 2 ranks"),
            (message(plain.to_global(&placement, [S(0), B])), "has 1 axes, but 2 SBPs are given"),
            (message(plain.to_global(&placement, [S(2)])), "S(2) needs a dimension 2"),
            (message(plain.to_local()), "make it global by to_global"),
            (message(plain.grad_sbp([B])), "make it global by to_global"),
            (message(uneven.to_global(&placement, [S(0)])), "it must have [2, 5]: parts are equal"),
            (message(columns.to_global(&placement, [S(0)])), "rank 1 has a tensor of shape [2, 4]"),
            (message(plain.to_kind(kind).to_global(&placement, [B])), "differ in kind"),
            (
                x.f_matmul(&on_other.tr()).unwrap_err().to_string(),
                "one input is placed on [0, 1], another one on [0]",
            ),
            (
                message(Placement::of([0, 1]).and_then(|of| plain.to_global(&of, [B]))),
                "make it by Placement::new(&group, ..)",
            ),
        ];
        for (message, expected) in cases {
            assert!(message.contains(expected), "{message}");
        }
    });
}

fn message<T>(result: global::Result<T>) -> String {
    result.err().expect("an error").to_string()
}

/// The sizes depend on values, so an operation of the same sizes need not fit the same `out`.
#[test]
fn out_gets_the_size_of_each_result() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        let out = global::zeros([2, 1], Kind::Int64, &placement, [B]).unwrap();
        for values in [[1f32, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]] {
            let plain = Tensor::from_slice(&values);
            let _ = global::distribute_tensor(&plain, &placement, [B]).unwrap().nonzero_out(&out);
            let expected = plain.nonzero();
            assert_eq!(out.size(), expected.size());
            assert_close(&out.full().unwrap(), &expected, 0.0);
        }
    });
}

/// Ranks outside a placement know which gradients a backward gives, whichever were asked for before.
#[test]
fn gradients_that_are_asked_for_reach_the_other_placement() {
    ranks(2, |group| {
        let first = Placement::new(&group, [0]).unwrap();
        let second = Placement::new(&group, [1]).unwrap();
        let leaf = |placement: &Placement, sizes: &[i64]| {
            let ones = global::ones(sizes, Kind::Float, placement, [B]).unwrap();
            ones.set_requires_grad(true)
        };
        let (weight, bias) = (leaf(&second, &[6]), leaf(&second, &[6]));
        let norm = |x: &Tensor| x.layer_norm([6], Some(&weight), Some(&bias), 1e-5, false);
        let x = global::randn([4, 6], Kind::Float, &second, [B]).unwrap();
        norm(&x).square().sum(Kind::Float).backward();
        let x = leaf(&first, &[4, 6]);
        let factors = global::randn([4, 6], Kind::Float, &second, [B]).unwrap();
        let moved = x.to_global(&second, [B]).unwrap();
        (norm(&moved) * factors).sum(Kind::Float).backward();
        assert!(x.grad().defined());
        assert_eq!(x.grad().full().unwrap().size(), [4, 6]);
    });
}

#[test]
fn ranges() {
    ranks(3, |group| {
        let placement = Placement::all(&group).unwrap();
        for sbp in [S(0), B, P] {
            let plain = |start: i64, end: i64, step: i64, kind| {
                Tensor::arange_start_step(start, end, step, (kind, Device::Cpu))
            };
            let same = |made: global::Result<Tensor>, expected: Tensor| {
                let made = made.unwrap();
                assert_eq!(made.sbp().unwrap(), [sbp]);
                assert_eq!(made.full().unwrap(), expected);
            };
            let (long, float) = (Kind::Int64, Kind::Float);
            same(global::arange(7, long, &placement, [sbp]), plain(0, 7, 1, long));
            same(global::arange(0, long, &placement, [sbp]), plain(0, 0, 1, long));
            let fractions = Tensor::arange_start_step(0.5, 2.9, 0.25, F32);
            same(global::arange_start_step(0.5, 2.9, 0.25, float, &placement, [sbp]), fractions);
            same(global::arange_start(-2, 5, float, &placement, [sbp]), plain(-2, 5, 1, float));
            let down = plain(9, -4, -3, long);
            same(global::arange_start_step(9, -4, -3, long, &placement, [sbp]), down);
            // f64 does not hold these.
            let large = (1_i64 << 60) + 1;
            let many = plain(large, large + 5000, 1000, long);
            same(
                global::arange_start_step(large, large + 5000, 1000, long, &placement, [sbp]),
                many,
            );
        }
        for (end, step) in [(5, -1), (5, 0), (-5, 1)] {
            let error = global::arange_start_step(0, end, step, Kind::Int64, &placement, [B]);
            let expected = format!("steps of {step} do not lead from 0 to {end}");
            assert!(error.unwrap_err().to_string().contains(&expected));
        }
        let error = global::arange(2.5, Kind::Int64, &placement, [S(0)]).unwrap_err();
        assert!(error.to_string().contains("are to be whole numbers of kind Int64"), "{error}");
        let back = global::arange_start_step(1, 0, 2, Kind::Int64, &placement, [S(0)]);
        assert!(back.unwrap_err().to_string().contains("do not lead from 1 to 0"));
    });
}

#[test]
fn full_of_whole_numbers() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        // f64 does not hold it.
        let large = (1_i64 << 60) + 1;
        let x = global::full([3], large, Kind::Int64, &placement, [S(0)]).unwrap();
        assert_eq!(x.full().unwrap(), Tensor::full([3], large, (Kind::Int64, Device::Cpu)));
        let x = global::full_like(&x, large, &placement, [B]).unwrap();
        assert_eq!(x.int64_value(&[2]), large);
        let x = global::full([3], 1, Kind::Bool, &placement, [P]).unwrap();
        assert_eq!(x.full().unwrap(), Tensor::ones([3], (Kind::Bool, Device::Cpu)));
    });
}
