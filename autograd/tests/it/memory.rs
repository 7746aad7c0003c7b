//! Tensors as bytes and bytes as tensors.

use std::sync::Arc;

use flow_autograd::{
    bytes, bytes_mut, data_ptr, dtype, identity, tensor_from_memory, tensor_from_raw, unsendable,
};
use flow_kernels::DType;
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

#[test]
fn bytes_are_those_of_the_elements() {
    let mut tensor = Tensor::from_slice(&[1.5f32, -2.0]);
    assert_eq!(bytes(&tensor).unwrap(), [1.5f32.to_ne_bytes(), (-2f32).to_ne_bytes()].concat());
    bytes_mut(&mut tensor).unwrap()[4..].copy_from_slice(&9f32.to_ne_bytes());
    assert_eq!(tensor.double_value(&[1]), 9.0);
    assert_eq!(bytes(&tensor.narrow(0, 1, 1)).unwrap(), 9f32.to_ne_bytes());
    assert!(bytes(&Tensor::zeros([0, 3], F32)).unwrap().is_empty());
}

#[test]
fn what_has_no_plain_bytes_says_why() {
    let matrix = Tensor::zeros([2, 3], F32);
    let cases = [
        (matrix.tr(), "not contiguous (shape [3, 2], strides [1, 3])"),
        (matrix.to_sparse_sparse_dim(2), "of a sparse or opaque layout"),
        (Tensor::new(), "undefined"),
    ];
    for (mut tensor, reason) in cases {
        let text = bytes(&tensor).unwrap_err().to_string();
        assert!(text.ends_with(reason), "{text}");
        assert!(bytes_mut(&mut tensor).is_err());
    }
}

#[test]
fn data_ptr_is_where_the_first_element_is() {
    let tensor = Tensor::zeros([4], F32);
    assert_eq!(data_ptr(&tensor), tensor.data_ptr().cast());
    assert_eq!(data_ptr(&tensor.narrow(0, 1, 2)).addr() - data_ptr(&tensor).addr(), 4);
    assert!(data_ptr(&Tensor::new()).is_null());
}

#[test]
fn handles_of_one_tensor_differ_from_other_tensors() {
    let tensor = Tensor::zeros([4], F32);
    let (handle, view) = (tensor.shallow_clone(), tensor.narrow(0, 0, 4));
    assert_eq!(identity(&handle), identity(&tensor));
    assert_ne!(identity(&view), identity(&tensor));
    assert_eq!(data_ptr(&view), data_ptr(&tensor));
}

#[test]
fn what_cannot_be_sent_says_why() {
    let matrix = Tensor::zeros([2, 3], F32);
    for plain in
        [&matrix, &matrix.tr(), &Tensor::zeros([0], F32), &matrix.to_kind(Kind::ComplexFloat)]
    {
        assert_eq!(unsendable(plain), None);
    }
    let cases = [
        (Tensor::new(), "is undefined: it must have a shape and elements"),
        (matrix.to_sparse_sparse_dim(2), "has the layout Sparse: make it dense by to_dense()"),
        (matrix.to_sparse_csr(None), "has the layout SparseCsr: make it dense by to_dense()"),
        (
            matrix.quantize_per_tensor(0.1, 0, Kind::QInt8),
            "is quantized: make it an ordinary tensor by dequantize()",
        ),
    ];
    for (tensor, reason) in cases {
        assert_eq!(unsendable(&tensor).as_deref(), Some(reason));
    }
}

#[test]
fn dtypes_have_the_size_of_their_kinds() {
    let kinds = [
        Kind::Float,
        Kind::Double,
        Kind::Half,
        Kind::BFloat16,
        Kind::Int,
        Kind::Int64,
        Kind::Uint8,
    ];
    let dtypes: Vec<DType> = kinds.into_iter().filter_map(dtype).collect();
    assert_eq!(dtypes, DType::ALL);
    for (kind, dtype) in kinds.into_iter().zip(dtypes) {
        assert_eq!(kind.elt_size_in_bytes(), dtype.size());
    }
    assert_eq!(dtype(Kind::Bool), None);
}

/// Memory whose end can be seen.
struct Witnessed(Vec<u8>, #[allow(dead_code)] Arc<()>);

impl AsMut<[u8]> for Witnessed {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

#[test]
fn a_tensor_frees_its_memory_with_its_last_user() {
    let witness = Arc::new(());
    let memory: Vec<u8> =
        [1i64, 2, 3, 4, 5, 6].iter().flat_map(|value| value.to_ne_bytes()).collect();
    let tensor =
        tensor_from_memory(Witnessed(memory, witness.clone()), &[2, 3], Kind::Int64).unwrap();
    assert_eq!(tensor.size(), [2, 3]);
    assert_eq!(Vec::<Vec<i64>>::try_from(&tensor).unwrap(), [[1, 2, 3], [4, 5, 6]]);
    let view = tensor.select(0, 1);
    drop(tensor);
    assert_eq!(Arc::strong_count(&witness), 2);
    let view = std::thread::spawn(move || view).join().unwrap();
    assert_eq!(Vec::<i64>::try_from(&view).unwrap(), [4, 5, 6]);
    std::thread::spawn(move || drop(view)).join().unwrap();
    assert_eq!(Arc::strong_count(&witness), 1);
}

#[test]
fn unfit_memory_is_refused_and_freed() {
    let witness = Arc::new(());
    for (shape, reason) in [
        (&[2, 3][..], "needs 24 bytes, not 20"),
        (&[-1], "cannot have"),
        (&[i64::MAX, 9], "cannot have"),
    ] {
        let text = tensor_from_memory(Witnessed(vec![0; 20], witness.clone()), shape, Kind::Float)
            .unwrap_err()
            .to_string();
        assert!(text.contains(reason), "{text}");
    }
    struct Odd(Vec<u32>);
    impl AsMut<[u8]> for Odd {
        fn as_mut(&mut self) -> &mut [u8] {
            // SAFETY: any byte of a u32 can be read and written.
            unsafe { &mut self.0.align_to_mut::<u8>().1[1..] }
        }
    }
    let text = tensor_from_memory(Odd(vec![0; 9]), &[8], Kind::Float).unwrap_err().to_string();
    assert!(text.contains("not aligned for kind Float"), "{text}");
    assert_eq!(Arc::strong_count(&witness), 1);
}

#[test]
fn a_tensor_over_a_pointer_drops_the_owner_last() {
    let mut memory = Box::new([1f32, 2.0, 3.0]);
    let data = memory.as_mut_ptr().cast();
    let witness = Arc::new(());
    // SAFETY: the owner holds the memory, which has room for the shape.
    let tensor =
        unsafe { tensor_from_raw(data, &[3], Kind::Float, Device::Cpu, (memory, witness.clone())) }
            .unwrap();
    let doubled = &tensor * 2;
    assert_eq!(data_ptr(&tensor), data);
    drop(tensor);
    assert_eq!(Arc::strong_count(&witness), 1);
    assert_eq!(Vec::<f32>::try_from(&doubled).unwrap(), [2.0, 4.0, 6.0]);
}

#[test]
fn a_destructor_that_panics_stays_in_the_shim() {
    struct Panics(Vec<u8>);
    impl AsMut<[u8]> for Panics {
        fn as_mut(&mut self) -> &mut [u8] {
            &mut self.0
        }
    }
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("in a destructor, as the test wants it");
        }
    }
    drop(tensor_from_memory(Panics(vec![0; 8]), &[8], Kind::Uint8).unwrap());
}
