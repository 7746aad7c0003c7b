//! Measures packing and unpacking beside a plain copy of the flat buffer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use flow_kernels::DType;
use flow_kernels::cuda::{self, Device, DeviceMemory, Event, FlatLayout, Packer, Stream};

use crate::{Outcome, View};

/// Of the flat buffer, whatever its type.
const BYTES: usize = 25 << 20;

/// Buffers are taken in turn, so that each is read from memory. They are 8 times 50 MiB and more,
/// and an H100 has at most 50 MB of L2.
const ROTATION: usize = 8;

/// Operations between two events: the time between them is for all, so that starting one hides
/// behind another.
const BATCH: usize = 4 * ROTATION;

/// The median of so many batches is reported.
const BATCHES: usize = 51;

/// The time of one operation.
struct Time {
    device: Duration,
    host: Duration,
}

pub fn run(device: &Arc<Device>, json: bool) -> Outcome {
    if !json {
        println!(
            "{device:?}, flat buffers of 25 MiB; GB/s counts every byte that is read or written, \
             and is the median of {BATCHES} batches of {BATCH} operations over {ROTATION} sets of \
             buffers in turn (L2 cannot hold them). Host: the median time of one call.\n\n\
             operation  tensors           flat     GB/s   copy GB/s   ratio   host us"
        );
    }
    let mut lines = Vec::new();
    for (tensors, flat) in
        [(DType::F32, DType::F32), (DType::F32, DType::BF16), (DType::BF16, DType::BF16)]
    {
        for count in [1, 30, 400] {
            for (operation, time, copy) in measure(device, tensors, flat, count)? {
                let moved = BYTES / flat.size() * (tensors.size() + flat.size());
                let rate = gigabytes(moved, time.device);
                let copy_rate = gigabytes(2 * BYTES, copy.device);
                let ratio = rate / copy_rate;
                let host = time.host.as_secs_f64() * 1e6;
                if json {
                    lines.push(format!(
                        "{{\"operation\":\"{operation}\",\"tensors\":\"{tensors}\",\"flat\":\"{flat}\",\"count\":{count},\
                         \"flat_bytes\":{BYTES},\"gb_per_s\":{rate:.1},\"copy_gb_per_s\":{copy_rate:.1},\
                         \"ratio\":{ratio:.4},\"host_us\":{host:.2}}}"
                    ));
                } else {
                    println!(
                        "{operation:<9} {count:>4} x {tensors:<12} {flat:<6} {rate:>7.0} \
                         {copy_rate:>11.0} {ratio:>7.2} {host:>9.1}"
                    );
                }
            }
        }
    }
    if json {
        let name = device.name();
        println!(
            "{{\"device\":\"{name}\",\"batch\":{BATCH},\"batches\":{BATCHES},\"results\":[{}]}}",
            lines.join(",")
        );
    }
    Ok(())
}

/// The times of packing and unpacking `count` equal tensors, each beside that of a copy.
fn measure(
    device: &Arc<Device>,
    tensors: DType,
    flat: DType,
    count: usize,
) -> Result<[(&'static str, Time, Time); 2], cuda::Error> {
    let lengths = vec![BYTES / flat.size() / count; count];
    let packer = Packer::new(device, tensors, flat, &lengths)?;
    let stream = Stream::high_priority(device)?;
    let own = FlatLayout::new(&lengths, tensors)?;
    let mut sets = Vec::new();
    for _ in 0..ROTATION {
        let arena = zeros(&stream, own.bytes())?;
        let buffer = zeros(&stream, packer.layout().bytes())?;
        let copy = zeros(&stream, packer.layout().bytes())?;
        sets.push((View::tensors(&arena, &own, 0), View::all(&buffer, flat), buffer, copy));
    }
    let pack = time(&stream, |i| {
        let (tensors, buffer, ..) = &mut sets[i];
        packer.pack(tensors, buffer, 0.5, &stream)
    })?;
    let beside_pack = time(&stream, |i| sets[i].3.copy_from(&*sets[i].2, &stream))?;
    let unpack = time(&stream, |i| {
        let (tensors, buffer, ..) = &mut sets[i];
        packer.unpack(buffer, tensors, &stream)
    })?;
    let beside_unpack = time(&stream, |i| sets[i].3.copy_from(&*sets[i].2, &stream))?;
    Ok([("pack", pack, beside_pack), ("unpack", unpack, beside_unpack)])
}

/// Memory of `bytes` zeros.
fn zeros(stream: &Stream, bytes: usize) -> Result<Arc<DeviceMemory>, cuda::Error> {
    let memory = DeviceMemory::allocate(stream.device(), bytes)?;
    memory.fill_zero(stream)?;
    Ok(Arc::new(memory))
}

/// The time of one `operation`, which is given the number of the buffers to use.
fn time(
    stream: &Stream,
    mut operation: impl FnMut(usize) -> Result<(), cuda::Error>,
) -> Result<Time, cuda::Error> {
    let start = Event::timed(stream.device())?;
    let end = Event::timed(stream.device())?;
    let mut device = Vec::new();
    let mut host = Vec::new();
    for batch in 0..BATCHES + 3 {
        start.record(stream)?;
        for i in 0..BATCH {
            let call = Instant::now();
            operation(i % ROTATION)?;
            host.push(call.elapsed());
        }
        end.record(stream)?;
        end.synchronize()?;
        if batch < 3 {
            host.clear(); // the first ones are slower: nothing is warm yet
            continue;
        }
        device.push(end.since(&start)? / BATCH as u32);
    }
    Ok(Time { device: median(device), host: median(host) })
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn gigabytes(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / 1e9 / time.as_secs_f64()
}
