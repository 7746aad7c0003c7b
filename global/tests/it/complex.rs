//! Global tensors of complex numbers.

use crate::common::ranks::{assert_close, ranks};
use flow_global as global;
use flow_global::{B, GlobalTensor, P, Placement, S, Sbp};
use flow_tensor::ReduceOp;
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// A sum of complex numbers is that of their real and imaginary parts.
#[test]
fn partial_sums_of_complex_tensors() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        for kind in [Kind::Float, Kind::Double] {
            let part = |start: i64| Tensor::arange_start(start, start + 20, (kind, Device::Cpu));
            let plain = Tensor::complex(&part(1), &part(-7)).view([4, 5]);
            let x = global::distribute_tensor(&plain, &placement, [S(1)]).unwrap();
            let y = global::distribute_tensor(&plain.tr().conj(), &placement, [S(0)]).unwrap();
            let product = x.matmul(&y);
            assert_eq!(product.sbp().unwrap(), [P]);
            let expected = plain.matmul(&plain.tr().conj());
            for sbp in [B, S(0), S(1)] {
                let boxed = product.to_global(&placement, [sbp]).unwrap().full().unwrap();
                assert_eq!(boxed.kind(), expected.kind());
                assert_close(&boxed.view_as_real(), &expected.view_as_real(), 0.0);
            }
            let sum = x.sum_dim_intlist([1i64].as_slice(), false, None);
            let expected = plain.sum_dim_intlist([1i64].as_slice(), false, None);
            assert_close(&sum.full().unwrap().view_as_real(), &expected.view_as_real(), 0.0);
        }
        // Products of partial products are not.
        let x =
            global::ones([2], Kind::ComplexFloat, &placement, [Sbp::Partial(ReduceOp::Product)]);
        let error = x.unwrap().full().unwrap_err().to_string();
        assert!(error.contains("partial values of kind ComplexFloat cannot be reduced"), "{error}");
    });
}

/// On two axes: one is added up, the other is averaged.
#[test]
fn partial_complex_tensors_on_a_mesh() {
    ranks(4, |group| {
        let placement = Placement::new(&group, [[0, 1], [2, 3]]).unwrap();
        let own =
            Tensor::complex(&Tensor::full([3], group.rank() as f64, F32), &Tensor::ones([3], F32));
        let sbp = [P, Sbp::Partial(ReduceOp::Avg)];
        let x = global::from_local(&own, [3], &placement, sbp).unwrap();
        let expected = Tensor::complex(&Tensor::full([3], 3.0, F32), &Tensor::full([3], 2.0, F32));
        assert_close(&x.full().unwrap().view_as_real(), &expected.view_as_real(), 0.0);
    });
}

/// A norm is a real number.
#[test]
fn norms_of_complex_tensors() {
    ranks(2, |group| {
        let placement = Placement::all(&group).unwrap();
        for (kind, real) in [(Kind::ComplexFloat, Kind::Float), (Kind::ComplexDouble, Kind::Double)]
        {
            let part = |start: i64| Tensor::arange_start(start, start + 12, (real, Device::Cpu));
            let plain = Tensor::complex(&part(1), &part(-7));
            let x = global::distribute_tensor(&plain, &placement, [S(0)]).unwrap();
            assert_eq!(x.kind(), kind);
            for order in [2.0, 1.0, f64::INFINITY] {
                let found = x.linalg_norm(order, None::<&[i64]>, false, None).full().unwrap();
                let expected = plain.linalg_norm(order, None::<&[i64]>, false, None);
                assert_eq!(found.kind(), expected.kind());
                assert_close(&found, &expected, 1e-4);
                // In double precision from the first element on.
                let found = x.linalg_norm(order, None::<&[i64]>, false, Kind::ComplexDouble);
                let expected = plain.linalg_norm(order, None::<&[i64]>, false, Kind::ComplexDouble);
                assert_eq!(found.kind(), expected.kind());
                assert_close(&found.full().unwrap(), &expected, 1e-12);
            }
        }
    });
}
