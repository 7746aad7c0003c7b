//! What OneFlow's global tensors can do, and what is said where something does not fit.

#[path = "common/ranks.rs"]
mod common;

use std::collections::HashMap;

use common::{assert_close, ranks};
use flow_global as global;
use flow_global::{GlobalTensor, Placement, B, P, S};
use tch::{nn, Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

#[test]
fn tensors_like_others() {
    ranks(3, |group| {
        let placement = Placement::new(&group, [2, 0]).unwrap();
        let plain = Tensor::zeros([3, 5], F32);
        let tensors = [
            (global::zeros_like(&plain, &placement, [S(0)]).unwrap(), Some(0.0)),
            (global::ones_like(&plain, &placement, [P]).unwrap(), Some(1.0)),
            (global::full_like(&plain, 7.0, &placement, [S(1)]).unwrap(), Some(7.0)),
            (global::empty_like(&plain, &placement, vec![B]).unwrap(), None),
            (global::rand_like(&plain, &placement, [S(0)]).unwrap(), None),
            (global::randn_like(&plain, &placement, [S(0)]).unwrap(), None),
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
        match is_inside {
            true => {
                let error = error.unwrap_err().to_string();
                assert!(error.contains("has a tensor of shape [5, 2]"), "{error}");
            }
            false => assert_eq!(error.unwrap().size(), [5, 2]),
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
                "one input lies on the placement [0, 1], another on [0]",
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
