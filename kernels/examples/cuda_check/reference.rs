//! What packing and unpacking must give, element by element.

use flow_kernels::{DType, bf16, f16};

/// An element in the type that it is multiplied in.
#[derive(Clone, Copy)]
enum Value {
    Single(f32),
    Double(f64),
}

/// `elements` times `scale`, in type `to`.
pub fn pack(from: DType, to: DType, elements: &[u8], scale: f64) -> Vec<u8> {
    convert(from, to, elements, |value| match value {
        Value::Single(value) => Value::Single(value * scale as f32),
        Value::Double(value) => Value::Double(value * scale),
    })
}

/// `elements` in type `to`.
pub fn unpack(from: DType, to: DType, elements: &[u8]) -> Vec<u8> {
    convert(from, to, elements, |value| value)
}

/// The first element at which the two differ, where any NaN equals any other.
pub fn first_difference(dtype: DType, left: &[u8], right: &[u8]) -> Option<usize> {
    left.chunks_exact(dtype.size())
        .zip(right.chunks_exact(dtype.size()))
        .position(|(left, right)| left != right && !(is_nan(dtype, left) && is_nan(dtype, right)))
}

/// One element for messages.
pub fn show(dtype: DType, element: &[u8]) -> String {
    let bits: String = element.iter().rev().map(|byte| format!("{byte:02x}")).collect();
    match widen(dtype, element) {
        Value::Single(value) => format!("{value:e} (0x{bits})"),
        Value::Double(value) => format!("{value:e} (0x{bits})"),
    }
}

/// `value`, rounded, in type `dtype`.
pub fn from_f64(dtype: DType, value: f64) -> Vec<u8> {
    let mut element = Vec::new();
    narrow(dtype, Value::Double(value), &mut element);
    element
}

fn convert(from: DType, to: DType, elements: &[u8], change: impl Fn(Value) -> Value) -> Vec<u8> {
    let mut result = Vec::with_capacity(elements.len() / from.size() * to.size());
    for element in elements.chunks_exact(from.size()) {
        narrow(to, change(widen(from, element)), &mut result);
    }
    result
}

fn widen(dtype: DType, element: &[u8]) -> Value {
    let bits = element.iter().rev().fold(0, |bits: u64, &byte| bits << 8 | u64::from(byte));
    match dtype {
        DType::F64 => Value::Double(f64::from_bits(bits)),
        DType::F32 => Value::Single(f32::from_bits(bits as u32)),
        DType::F16 => Value::Single(f16::from_bits(bits as u16).to_f32()),
        DType::BF16 => Value::Single(bf16::from_bits(bits as u16).to_f32()),
        DType::I32 | DType::I64 | DType::U8 => unreachable!("no kernel packs {dtype}"),
    }
}

/// A double becomes a half by way of `f32`.
fn narrow(dtype: DType, value: Value, to: &mut Vec<u8>) {
    let (single, double) = match value {
        Value::Single(value) => (value, f64::from(value)),
        Value::Double(value) => (value as f32, value),
    };
    match dtype {
        DType::F64 => to.extend(double.to_le_bytes()),
        DType::F32 => to.extend(single.to_le_bytes()),
        DType::F16 => to.extend(f16::from_f32(single).to_le_bytes()),
        DType::BF16 => to.extend(bf16::from_f32(single).to_le_bytes()),
        DType::I32 | DType::I64 | DType::U8 => unreachable!("no kernel packs {dtype}"),
    }
}

fn is_nan(dtype: DType, element: &[u8]) -> bool {
    match widen(dtype, element) {
        Value::Single(value) => value.is_nan(),
        Value::Double(value) => value.is_nan(),
    }
}
