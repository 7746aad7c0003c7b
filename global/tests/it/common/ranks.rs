//! Ranks that are threads.

use std::time::Duration;

use flow_tensor::ProcessGroup;
use tch::Tensor;

/// Runs `body` on each of so many ranks, and returns what they have returned.
pub fn ranks<T: Send>(size: usize, body: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let groups = ProcessGroup::in_process(size).unwrap();
    std::thread::scope(|scope| {
        let start = |group: ProcessGroup| {
            group.set_timeout(Duration::from_secs(60));
            scope.spawn(|| body(group))
        };
        let threads: Vec<_> = groups.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// That tensors have the same size, and elements that differ by no more than this.
#[allow(dead_code)] // not all programs compare tensors
#[track_caller]
pub fn assert_close(a: &Tensor, b: &Tensor, tolerance: f64) {
    assert_eq!(a.size(), b.size());
    if a.numel() > 0 {
        let worst = (a - b).abs().max().double_value(&[]);
        assert!(worst <= tolerance, "{worst}: {a:?} {b:?}");
    }
}
