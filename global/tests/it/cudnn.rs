//! cuDNN's batch norm, which libtorch takes on GPUs: over a split batch or split channels Flow's own
//! code runs, on CPUs too, and gives what the native one gives.

use crate::common::ranks::{assert_close, ranks};
use flow_global::{GlobalTensor, Placement, S, distribute_tensor};
use tch::{Device, Kind, Tensor};

const OPTIONS: (Kind, Device) = (Kind::Double, Device::Cpu);

/// Input, weight, bias, running mean and variance, and the gradient of the result.
fn tensors() -> [Tensor; 6] {
    let wave = |sizes: &[i64], speed: f64| {
        let count: i64 = sizes.iter().product();
        (Tensor::arange(count, OPTIONS) * speed).sin().view(sizes)
    };
    let shape = [5, 4, 3, 2];
    let variance = wave(&[4], 0.3).square() + 0.5;
    [
        wave(&shape, 0.7),
        wave(&[4], 1.1),
        wave(&[4], 2.3),
        wave(&[4], 0.9),
        variance,
        wave(&shape, 1.7),
    ]
}

#[test]
fn split_batches_and_channels_give_what_the_native_one_gives() {
    for (data, channels) in [(S(0), flow_global::B), (S(1), S(0))] {
        ranks(2, |group| {
            let placement = Placement::all(&group).unwrap();
            let [x, w, b, mean, variance, gradient] = tensors();
            let leaf = |tensor: &Tensor| tensor.copy().set_requires_grad(true);
            let plain = [leaf(&x), leaf(&w), leaf(&b)];
            let (own_mean, own_variance) = (mean.copy(), variance.copy());
            let (expected, ..) = Tensor::native_batch_norm(
                &plain[0],
                Some(&plain[1]),
                Some(&plain[2]),
                Some(&own_mean),
                Some(&own_variance),
                true,
                0.1,
                1e-5,
            );
            (&expected * &gradient).sum(Kind::Double).backward();

            let place =
                |tensor: &Tensor, sbp| distribute_tensor(tensor, &placement, [sbp]).unwrap();
            let global = [
                place(&x, data).set_requires_grad(true),
                place(&w, channels).set_requires_grad(true),
                place(&b, channels).set_requires_grad(true),
            ];
            let [mean, variance] = [mean, variance].map(|one| place(&one, channels));
            let (result, _, _, memory) = global[0].cudnn_batch_norm(
                &global[1],
                Some(&global[2]),
                Some(&mean),
                Some(&variance),
                true,
                0.1,
                1e-5,
            );
            assert_eq!(memory.size(), [0]);
            assert_eq!(result.sbp().unwrap(), [data]);
            (&result * place(&gradient, data)).sum(Kind::Double).backward();

            let pairs = [(&result, &expected), (&mean, &own_mean), (&variance, &own_variance)];
            for (global, plain) in pairs {
                assert_close(&global.full().unwrap(), plain, 1e-12);
            }
            for (global, plain) in global.iter().zip(&plain) {
                assert_close(&global.grad().full().unwrap(), &plain.grad(), 1e-12);
            }
        });
    }
}
