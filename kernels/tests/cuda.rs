//! What must hold without a GPU; `examples/cuda_check` checks the rest on one.

use flow_kernels::DType;
use flow_kernels::cuda::{Device, Error, compile};

#[test]
fn without_a_driver_the_error_names_what_is_missing() {
    match Device::count() {
        Ok(count) => {
            println!("SKIPPED: using CUDA without a driver: this machine has one, and {count} GPUs")
        }
        Err(error @ Error::NoDriver { .. }) => {
            assert!(error.to_string().contains("libcuda.so.1 is not found"), "{error}");
            let error = Device::open(0).unwrap_err();
            assert!(matches!(error, Error::NoDriver { .. }), "{error}");
        }
        Err(error) => {
            println!(
                "SKIPPED: using CUDA without a driver: this machine has one that does not work: \
                 {error}"
            )
        }
    }
}

#[test]
fn only_floating_point_types_are_packed() {
    for (tensors, flat) in [(DType::I64, DType::F32), (DType::F32, DType::U8)] {
        let error = compile(tensors, flat, 90).unwrap_err();
        assert!(matches!(error, Error::Argument(_)), "{error}");
    }
}
