//! Packs and unpacks random tensors of every pair of types, and compares all memory with the
//! reference.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use flow_kernels::DType;
use flow_kernels::cuda::{Device, DeviceMemory, FlatLayout, Packer, Stream};

use crate::{Outcome, View, reference, upload};

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// What lies in memory before it is written, and must still lie where nothing is to be written.
const POISON: u8 = 0xa5;

/// One set of tensors.
struct Case {
    name: &'static str,
    lengths: Vec<usize>,
    /// Elements by which each tensor lies behind an aligned address.
    shift: usize,
    scale: f64,
}

pub fn run(device: &Arc<Device>) -> Outcome {
    let seed = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64;
    println!("{device:?}, seed {seed:#x}");
    let mut random = Random(seed | 1);
    let stream = Stream::high_priority(device)?;
    let mut checked = 0;
    for (tensors, flat) in FLOATS.iter().flat_map(|&tensors| FLOATS.map(|flat| (tensors, flat))) {
        for case in cases(tensors, flat, &mut random) {
            let fail = |error| format!("{tensors} -> {flat}, {}: {error}", case.name);
            check(&stream, &case, tensors, flat, &mut random).map_err(fail)?;
            checked += 1;
            if tensors == flat && case.shift == 0 {
                check_in_place(&stream, &case, flat, &mut random).map_err(fail)?;
                checked += 1;
            }
        }
    }
    println!("{checked} cases are right");
    Ok(())
}

fn cases(tensors: DType, flat: DType, random: &mut Random) -> Vec<Case> {
    let sizes = vec![0, 1, 2, 3, 7, 8, 17, 255, 4095, 4096, 4097, 8191, 0, 100_003];
    let many = (0..1000).map(|_| random.below(3000) as usize).collect();
    let mut cases = vec![
        Case { name: "no tensors", lengths: Vec::new(), shift: 0, scale: 1.0 },
        Case { name: "only empty tensors", lengths: vec![0; 500], shift: 0, scale: 1.0 },
        Case { name: "all sizes", lengths: sizes.clone(), shift: 0, scale: 1.0 / 3.0 },
        Case { name: "all sizes, times 1", lengths: sizes.clone(), shift: 0, scale: 1.0 },
        Case {
            name: "all sizes, one element behind alignment",
            lengths: sizes.clone(),
            shift: 1,
            scale: 1.0 / 3.0,
        },
        Case {
            name: "all sizes, three elements behind alignment",
            lengths: sizes,
            shift: 3,
            scale: 0.125,
        },
        Case { name: "1000 tensors", lengths: many, shift: 0, scale: 1.0 / 7.0 },
    ];
    if tensors == flat {
        let lengths = vec![(25 << 20) / flat.size()];
        cases.push(Case { name: "25 MiB in one tensor", lengths, shift: 0, scale: 0.25 });
    }
    cases
}

/// Packs into poisoned memory, then unpacks other content into the tensors.
fn check(
    stream: &Stream,
    case: &Case,
    tensors: DType,
    flat: DType,
    random: &mut Random,
) -> Outcome {
    let packer = Packer::new(stream.device(), tensors, flat, &case.lengths)?;
    let own = FlatLayout::new(&case.lengths, tensors)?;
    let arena = random.elements(tensors, own.bytes() / tensors.size() + case.shift);
    let arena_memory = upload(stream.device(), &arena)?;
    let mut views = View::tensors(&arena_memory, &own, case.shift);

    let mut expected = vec![POISON; packer.layout().bytes()];
    let memory = upload(stream.device(), &expected)?;
    for (place, own_place, length) in places(packer.layout(), &own) {
        let source = &arena[(own_place + case.shift) * tensors.size()..][..length * tensors.size()];
        let packed = reference::pack(tensors, flat, source, case.scale);
        expected[place * flat.size()..][..packed.len()].copy_from_slice(&packed);
    }
    packer.pack(&views, &mut View::all(&memory, flat), case.scale, stream)?;
    compare(stream, "pack", flat, &memory, &expected)?;
    compare(stream, "pack (its sources)", tensors, &arena_memory, &arena)?;

    let content = random.elements(flat, packer.layout().bytes() / flat.size());
    let memory = upload(stream.device(), &content)?;
    let mut expected = vec![POISON; arena.len()];
    arena_memory.write(&expected)?;
    for (place, own_place, length) in places(packer.layout(), &own) {
        let unpacked = reference::unpack(
            flat,
            tensors,
            &content[place * flat.size()..][..length * flat.size()],
        );
        expected[(own_place + case.shift) * tensors.size()..][..unpacked.len()]
            .copy_from_slice(&unpacked);
    }
    packer.unpack(&View::all(&memory, flat), &mut views, stream)?;
    compare(stream, "unpack", tensors, &arena_memory, &expected)?;
    compare(stream, "unpack (its source)", flat, &memory, &content)
}

/// Packs tensors that lie in the flat buffer already.
fn check_in_place(stream: &Stream, case: &Case, flat: DType, random: &mut Random) -> Outcome {
    let packer = Packer::new(stream.device(), flat, flat, &case.lengths)?;
    let mut content = random.elements(flat, packer.layout().bytes() / flat.size());
    let memory = upload(stream.device(), &content)?;
    for (place, _, length) in places(packer.layout(), packer.layout()) {
        let part = &mut content[place * flat.size()..][..length * flat.size()];
        let scaled = reference::pack(flat, flat, part, case.scale);
        part.copy_from_slice(&scaled);
    }
    let views = View::tensors(&memory, packer.layout(), 0);
    packer.pack(&views, &mut View::all(&memory, flat), case.scale, stream)?;
    compare(stream, "pack in place", flat, &memory, &content)
}

/// Each tensor's place in both layouts, and its length.
fn places<'a>(
    flat: &'a FlatLayout,
    own: &'a FlatLayout,
) -> impl Iterator<Item = (usize, usize, usize)> + 'a {
    flat.places()
        .iter()
        .zip(own.places())
        .zip(flat.lengths())
        .map(|((&flat, &own), &length)| (flat, own, length))
}

fn compare(
    stream: &Stream,
    operation: &str,
    dtype: DType,
    memory: &DeviceMemory,
    expected: &[u8],
) -> Outcome {
    stream.synchronize()?;
    let mut got = vec![0; expected.len()];
    memory.read(&mut got)?;
    let Some(i) = reference::first_difference(dtype, &got, expected) else { return Ok(()) };
    let show =
        |elements: &[u8]| reference::show(dtype, &elements[i * dtype.size()..][..dtype.size()]);
    Err(format!("{operation} gives {} instead of {} at element {i}", show(&got), show(expected))
        .into())
}

/// Xorshift: the numbers need only be varied.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 32) % limit
    }

    /// `count` elements. A quarter is of random bits, with NaN, infinities and subnormals among
    /// them. The others are between 2^-26 and 2^18, where halves are subnormal, normal and too
    /// large.
    fn elements(&mut self, dtype: DType, count: usize) -> Vec<u8> {
        let mut elements = Vec::with_capacity(count * dtype.size());
        for _ in 0..count {
            if self.below(4) == 0 {
                elements.extend(&self.next().to_le_bytes()[..dtype.size()]);
            } else {
                let mantissa = (self.next() as i64 >> 10) as f64 / (1u64 << 53) as f64;
                let exponent = self.below(44) as i32 - 26;
                elements.extend(reference::from_f64(dtype, mantissa * f64::from(exponent).exp2()));
            }
        }
        elements
    }
}
