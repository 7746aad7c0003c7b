//! What the jobs run: the table, on each back-end.

use anyhow::{Context, Result, ensure};
use flow_comm::ProcessGroup;

use super::host::{Host, Place};
use super::nccl::OnGpu;
use super::table::{check_type, check_types};

/// Bytes that ordinary memory is staged in at once.
const CHUNK: usize = 256 << 10;

pub fn on_host(group: &ProcessGroup) -> Result<()> {
    for place in [Place::Shared, Place::Ordinary, Place::Mixed] {
        let host = Host::new(group, place)?;
        check_types(&host, |dtype| vec![0, 1, 3, 1000, CHUNK / dtype.size() + 1])
            .with_context(|| format!("{place:?} memory"))?;
        group.barrier()?;
    }
    Ok(())
}

pub fn large_on_host(group: &ProcessGroup) -> Result<()> {
    check_type::<_, f32>(&Host::new(group, Place::Mixed)?, &[100_003, 2_000_000])
}

/// Runs it on overlapping groups, each on a thread of its own.
pub fn groups_at_once(group: &ProcessGroup) -> Result<()> {
    let size = group.world_size();
    let every_other = (0..2.min(size)).map(|first| (first..size).step_by(2).collect::<Vec<_>>());
    let opposite = (0..size / 2).map(|rank| vec![rank, size - 1 - rank]);
    let mut own = Vec::new();
    for ranks in every_other.chain(opposite) {
        own.extend(group.new_group(&ranks)?);
    }
    let check = |group: &ProcessGroup| {
        check_type::<_, f32>(&Host::new(group, Place::Ordinary)?, &[1000, 50_000])
            .with_context(|| format!("the group of ranks {:?}", group.ranks()))
    };
    own.iter().try_for_each(check)?;
    std::thread::scope(|scope| {
        let groups = own.iter().chain([group]);
        let threads: Vec<_> = groups.map(|group| scope.spawn(|| check(group))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no check panics"))
    })
}

pub fn over_nccl(group: &ProcessGroup) -> Result<()> {
    let device = group.use_cuda()?;
    let shares = std::env::var_os("FLOW_TEST_SHARE_GPUS").is_some_and(|value| value == "1");
    ensure!(
        shares || device.ordinal() == group.local_rank(),
        "{device:?} is not the GPU of this local rank"
    );
    let check = OnGpu::new(group, &device)?;
    check_types(&check, |_| vec![0, 1, 5, 1000, 70_001])?;
    several_in_a_broadcast(&check)?;
    wrong_counts(&check)?;
    check.nccl.barrier()?;
    Ok(())
}

/// Arrays of two types.
fn several_in_a_broadcast(check: &OnGpu) -> Result<()> {
    let rank = check.nccl.rank() as u8;
    let root = check.nccl.size() as u8 - 1;
    let mut arrays =
        [check.gpu.upload(&[i32::from(rank); 1000])?, check.gpu.upload(&[f32::from(rank); 3])?];
    check.nccl.broadcast(&mut arrays, root.into(), &check.gpu.stream)?;
    let [whole, float] = &arrays;
    ensure!(check.gpu.download::<i32>(whole)? == [i32::from(root); 1000]);
    ensure!(check.gpu.download::<f32>(float)? == [f32::from(root); 3]);
    Ok(())
}

fn wrong_counts(check: &OnGpu) -> Result<()> {
    let size = check.nccl.size();
    let input = check.gpu.upload(&[0_i32])?;
    let mut output = check.gpu.upload(&[0_i32; 2])?;
    let counts = vec![1; size + 1];
    let wrong = check.nccl.all_gather_v(&input, &mut output, &counts, &check.gpu.stream);
    let wrong = wrong.err().map(|error| error.to_string()).unwrap_or_default();
    let expected = format!("all_gather_v: counts has {} entries for {size} ranks", size + 1);
    ensure!(wrong.contains(&expected), "{wrong:?}");
    Ok(())
}
