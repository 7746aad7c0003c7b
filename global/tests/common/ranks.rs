//! Ranks that are threads.

use std::time::Duration;

use flow_tensor::ProcessGroup;
use tch::Tensor;

/// Runs `body` on so many ranks.
pub fn ranks(size: usize, body: impl Fn(ProcessGroup) + Sync) {
    let groups = ProcessGroup::in_process(size).unwrap();
    std::thread::scope(|scope| {
        for group in groups {
            group.set_timeout(Duration::from_secs(60));
            let body = &body;
            scope.spawn(move || body(group));
        }
    });
}

#[allow(dead_code)] // not all tests compare tensors
/// That tensors have the same size, and elements that differ by no more than this.
#[track_caller]
pub fn assert_close(a: &Tensor, b: &Tensor, tolerance: f64) {
    assert_eq!(a.size(), b.size());
    if a.numel() > 0 {
        let worst = (a - b).abs().max().double_value(&[]);
        assert!(worst <= tolerance, "{worst}: {a:?} {b:?}");
    }
}
