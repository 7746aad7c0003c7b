//! Operations whose inputs are on different placements, after `move_inputs(true)`: a process has one
//! such choice, so this is a program of its own.

#[path = "it/common/ranks.rs"]
mod ranks;

use flow_global as global;
use flow_global::explain::Why;
use flow_global::{B, GlobalTensor, P, Placement, S, Sbp};
use ranks::{assert_close, ranks};
use tch::{Device, Kind, Tensor, nn, nn::Module};

const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

fn numbers(sizes: [i64; 2]) -> Tensor {
    (Tensor::arange(sizes[0] * sizes[1], F64).view(sizes) * 0.37).sin()
}

/// Two layers on two placements, without a word of `to_global` between them.
#[test]
fn inputs_are_moved_and_gradients_come_back() {
    global::move_inputs(true);
    ranks(4, |group| {
        let first = Placement::new(&group, [0, 1]).unwrap();
        let second = Placement::new(&group, [3, 2, 1]).unwrap();
        let mesh = Placement::new(&group, [[0, 1], [2, 3]]).unwrap();
        let cases: [(&Placement, &[Sbp], &[Sbp]); 4] = [
            (&second, &[S(0)], &[B]),
            (&second, &[S(1)], &[S(1)]),
            (&mesh, &[S(0)], &[B, S(0)]),
            (&mesh, &[P], &[S(0), S(1)]),
        ];
        for (other, of_x, of_w) in cases {
            let plain = [numbers([5, 6]), numbers([6, 4]), numbers([4, 9])];
            let leaf = |value: &Tensor, placement: &Placement, sbp: &[Sbp]| {
                let leaf = global::distribute_tensor(value, placement, sbp).unwrap();
                leaf.set_requires_grad(true)
            };
            let x = leaf(&plain[0], &first, of_x);
            let w = [leaf(&plain[1], &first, &[B]), leaf(&plain[2], other, of_w)];
            let h = x.matmul(&w[0]).tanh();
            let (y, table) = global::explain(|| h.matmul(&w[1]));
            let moves = table.rows.iter().filter(|row| row.why == Why::Asked).count();
            assert_eq!((y.placement().unwrap(), moves), (other.clone(), 1), "{table}");
            y.pow_tensor_scalar(2).sum(Kind::Double).backward();

            let own = plain.map(|value| value.set_requires_grad(true));
            let expected = own[0].matmul(&own[1]).tanh().matmul(&own[2]);
            expected.pow_tensor_scalar(2).sum(Kind::Double).backward();
            assert_close(&y.full().unwrap(), &expected, 1e-12);
            let leaves = [&x, &w[0], &w[1]];
            for (leaf, own) in leaves.into_iter().zip(&own) {
                let gradient = leaf.grad();
                assert_eq!(gradient.placement().unwrap(), leaf.placement().unwrap());
                assert_close(&gradient.full().unwrap(), &own.grad(), 1e-12);
            }
        }
    });
}

/// The gradient of a moved tensor that is no leaf is on that tensor's placement when it gets there.
#[test]
fn gradients_of_tensors_on_the_way_come_back() {
    global::move_inputs(true);
    ranks(3, |group| {
        let first = Placement::new(&group, [0, 1]).unwrap();
        let second = Placement::new(&group, [1, 2]).unwrap();
        let x = global::distribute_tensor(&numbers([4, 6]), &first, [S(0)]).unwrap();
        let x = x.set_requires_grad(true);
        let w = global::distribute_tensor(&numbers([6, 8]), &second, [B]).unwrap();
        let ((), table) = global::explain(|| {
            (x.exp().matmul(&w)).sum(Kind::Double).backward();
        });
        // Forward, and the gradient of `exp`: its backward finds it where the result of `exp` is.
        let moves = table.rows.iter().filter(|row| row.why == Why::Asked);
        assert_eq!(moves.map(|row| row.count).sum::<usize>(), 2, "{table}");
        // Differentiated twice.
        let y = x.exp().matmul(&w).sum(Kind::Double);
        let once = Tensor::run_backward(&[y], &[&x], true, true).remove(0);
        let twice = Tensor::run_backward(&[once.sum(Kind::Double)], &[&x], false, false).remove(0);
        let plain = numbers([4, 6]).exp() * numbers([6, 8]).sum_dim_intlist(1, false, Kind::Double);
        assert_close(&once.full().unwrap(), &plain, 1e-12);
        assert_close(&twice.full().unwrap(), &plain, 1e-12);
    });
}

/// Lists of tensors, modules, and what is written.
#[test]
fn lists_modules_and_writes() {
    global::move_inputs(true);
    ranks(3, |group| {
        let first = Placement::new(&group, [0, 1]).unwrap();
        let second = Placement::new(&group, [2]).unwrap();
        let on = |placement: &Placement, sbp: Sbp| {
            global::distribute_tensor(&numbers([4, 6]), placement, [sbp]).unwrap()
        };
        let (a, b) = (on(&first, S(0)), on(&second, B));
        let all = Tensor::cat(&[&a, &b, &a], 0);
        assert_eq!(all.placement().unwrap(), first);
        let plain = numbers([4, 6]);
        assert_close(&all.full().unwrap(), &Tensor::cat(&[&plain, &plain, &plain], 0), 0.0);
        // What is written stays where it is, however small it is.
        let mut row = b.narrow(0, 0, 1).copy();
        let _ = row.g_add_(&a.narrow(0, 1, 1));
        assert_eq!(row.placement().unwrap(), second);
        let expected = plain.narrow(0, 0, 1) + plain.narrow(0, 1, 1);
        assert_close(&row.full().unwrap(), &expected, 0.0);

        let vs = nn::VarStore::new(Device::Cpu);
        let layer = nn::linear(vs.root(), 6, 64, Default::default());
        global::distribute(&vs, &second, |_, _| [B]).unwrap();
        let y = layer.forward(&a.to_kind(Kind::Float));
        assert_eq!((y.size(), y.placement().unwrap()), (vec![4, 64], second));
    });
}
