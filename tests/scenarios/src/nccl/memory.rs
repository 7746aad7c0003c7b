//! Numbers in device memory, written and read in the order of a stream: whoever does not keep that
//! order finds others.

use std::sync::Arc;

use anyhow::Result;
use flow_comm::nccl::{Device, DeviceBuffer, DeviceMemory, Stream};
use flow_comm::{Buffer, DType, Element, bf16, f16};

/// A rank's GPU and the stream that it computes on.
pub struct Gpu {
    pub device: Arc<Device>,
    pub stream: Stream,
}

impl Gpu {
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        Ok(Self { device: Arc::clone(device), stream: Stream::high_priority(device)? })
    }

    /// Numbers that come to the memory in the order of the stream.
    pub fn array(&self, dtype: DType, numbers: &[f64]) -> Result<Array> {
        self.array_of(dtype, &encode(dtype, numbers))
    }

    /// The same for numbers of a type that is known.
    pub fn upload<T: Element>(&self, numbers: &[T]) -> Result<Array> {
        self.array_of(T::DTYPE, numbers.bytes())
    }

    fn array_of(&self, dtype: DType, bytes: &[u8]) -> Result<Array> {
        let source = DeviceMemory::allocate(&self.device, bytes.len())?;
        source.write(bytes)?;
        let array = Array {
            memory: DeviceMemory::allocate(&self.device, bytes.len())?,
            dtype,
            _others: Vec::new(),
        };
        array.memory.write(&vec![0xAB; bytes.len()])?;
        array.memory.copy_from(&source, &self.stream)?;
        Ok(Array { _others: vec![source], ..array })
    }

    /// What an array holds when the stream has come so far.
    pub fn download<T: Element + Default>(&self, array: &Array) -> Result<Vec<T>> {
        let copy = self.snapshot(array)?;
        self.stream.synchronize()?;
        let mut numbers = vec![T::default(); copy.bytes() / T::DTYPE.size()];
        copy.memory.read(numbers.bytes_mut())?;
        Ok(numbers)
    }

    /// What the memory holds when the stream has come so far; to be read by [`Array::numbers`].
    pub fn snapshot(&self, buffer: &dyn DeviceBuffer) -> Result<Array> {
        let memory = DeviceMemory::allocate(&self.device, buffer.bytes())?;
        memory.copy_from(buffer, &self.stream)?;
        Ok(Array { memory, dtype: buffer.dtype(), _others: Vec::new() })
    }
}

pub struct Array {
    memory: DeviceMemory,
    dtype: DType,
    /// Memory that is being copied from: freeing it would wait for the device, and hide what is
    /// checked.
    _others: Vec<DeviceMemory>,
}

// SAFETY: the memory is the array's, and freed when the device has done all its work.
unsafe impl DeviceBuffer for Array {
    fn address(&self) -> u64 {
        self.memory.address()
    }

    fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    fn dtype(&self) -> DType {
        self.dtype
    }
}

impl Array {
    /// The numbers, when the stream is done.
    pub fn numbers(&self, gpu: &Gpu) -> Result<Vec<f64>> {
        gpu.stream.synchronize()?;
        let mut bytes = vec![0; self.memory.bytes()];
        self.memory.read(&mut bytes)?;
        Ok(decode(self.dtype, &bytes))
    }
}

fn encode(dtype: DType, numbers: &[f64]) -> Vec<u8> {
    let bytes = |&number: &f64| match dtype {
        DType::F32 => (number as f32).to_ne_bytes().to_vec(),
        DType::F64 => number.to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f64(number).to_ne_bytes().to_vec(),
        DType::BF16 => bf16::from_f64(number).to_ne_bytes().to_vec(),
        DType::I32 => (number as i32).to_ne_bytes().to_vec(),
        DType::I64 => (number as i64).to_ne_bytes().to_vec(),
        DType::U8 => vec![number as u8],
    };
    numbers.iter().flat_map(bytes).collect()
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
        bytes.chunks_exact(N).filter_map(|word| word.try_into().ok())
    }
    match dtype {
        DType::F32 => words(bytes).map(|word| f32::from_ne_bytes(word).into()).collect(),
        DType::F64 => words(bytes).map(f64::from_ne_bytes).collect(),
        DType::F16 => words(bytes).map(|word| f16::from_ne_bytes(word).into()).collect(),
        DType::BF16 => words(bytes).map(|word| bf16::from_ne_bytes(word).into()).collect(),
        DType::I32 => words(bytes).map(|word| i32::from_ne_bytes(word).into()).collect(),
        DType::I64 => words(bytes).map(|word| i64::from_ne_bytes(word) as f64).collect(),
        DType::U8 => bytes.iter().map(|&byte| byte.into()).collect(),
    }
}
