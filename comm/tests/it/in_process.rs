//! Groups whose ranks are threads of one process: how they begin, fail and end. Their collectives,
//! messages and buckets are checked with those of all groups, in `tests/scenarios`.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use flow_comm::{Axis, Background, Error, Lane, Mesh, ProcessGroup, ReduceOp};

/// Longer than any wait that is to succeed, on a loaded machine too.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Runs each rank on a thread of its own.
fn ranks<T: Send>(size: usize, run: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let groups = ProcessGroup::in_process(size).unwrap();
    let run = &run;
    std::thread::scope(|scope| {
        let start = |group: ProcessGroup| {
            group.set_timeout(TIMEOUT);
            scope.spawn(move || run(group))
        };
        let threads: Vec<_> = groups.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn groups_and_meshes() {
    ranks(8, |world| {
        let rank = world.rank();
        let sub_group = world.new_group(&[4, 2, 7]).unwrap();
        assert_eq!(sub_group.is_some(), [2, 4, 7].contains(&rank));
        if let Some(group) = sub_group {
            assert_eq!(group.ranks(), [4, 2, 7]);
            let mut content = [rank as i64];
            group.broadcast(&mut content, 0).unwrap();
            assert_eq!(content, [4]);
        }
        let parity = world.split(Some(rank % 2), -(rank as i64)).unwrap().unwrap();
        assert_eq!(parity.ranks(), [[6, 4, 2, 0], [7, 5, 3, 1]][rank % 2]);

        let mesh = Mesh::new(&world, &[0, 1, 2, 3, 4, 5, 6, 7], &[2, 2, 2]).unwrap();
        let mesh = mesh.with_names(&["data", "pipeline", "tensor"]).unwrap();
        for (axis, stride) in [("data", 4), ("pipeline", 2), ("tensor", 1)] {
            let group = mesh.group(axis).unwrap();
            let first = rank - rank / stride % 2 * stride;
            assert_eq!(group.ranks(), [first, first + stride]);
            let mut sum = [rank as i64];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [(2 * first + stride) as i64]);
        }
        let plane = mesh.sub_mesh(&[Axis::Name("tensor"), Axis::Name("data")]).unwrap();
        assert_eq!((plane.shape(), plane.ranks()[0]), (&[2, 2][..], rank & 2));

        let pair = world.new_group_of(&[rank ^ 1, rank], &format!("pair {}", rank / 2));
        let order = if rank % 2 == 0 { [1, 0] } else { [0, 1] };
        // The members of a pair give different lists.
        assert!(matches!(pair, Err(Error::Mismatch { .. })), "{order:?}: {pair:?}");
        let pair = [rank & !1, rank | 1];
        let pair = world.new_group_of(&pair, &format!("ordered pair {}", rank / 2)).unwrap();
        let twin = pair.duplicate().unwrap();
        let mut counts = [[1_i64], [1]];
        pair.all_reduce(&mut counts[0], ReduceOp::Sum).unwrap();
        twin.all_reduce(&mut counts[1], ReduceOp::Sum).unwrap();
        assert_eq!(counts, [[2], [2]]);
    });
}

#[test]
fn ranks_that_disagree_get_an_error() {
    let errors = ranks(3, |group| {
        let mut data = vec![0_f32; if group.rank() == 1 { 20 } else { 10 }];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("all_reduce #0 (10 x f32, sum)"), "{error}");
        assert!(error.contains("all_reduce #0 (20 x f32, sum)"), "{error}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let outcomes = ranks(3, |group| {
        group.set_timeout(Duration::from_millis(300));
        let error = (group.rank() != 2).then(|| group.barrier().unwrap_err());
        (group, error)
    });
    // The first of the two to find out has the timeout as its error; the other gets it as the
    // cause.
    let errors = outcomes.iter().filter_map(|(_, error)| error.as_ref());
    assert!(errors.clone().any(|error| matches!(error, Error::Timeout { .. })));
    for error in errors.map(Error::to_string) {
        assert!(error.contains("timed out") && error.contains("waited for rank 2"), "{error}");
    }
    for (group, _) in &outcomes {
        assert!(matches!(group.barrier(), Err(Error::Poisoned { .. })));
    }
}

#[test]
fn work_beside_the_program_has_time_until_the_program_waits_for_it() {
    const SHORT: Duration = Duration::from_millis(50);
    ranks(2, |group| {
        Background::default().enter();
        if group.rank() == 1 {
            std::thread::sleep(6 * SHORT);
        }
        group.with_timeout(SHORT).barrier().unwrap();
    });
    let outcomes = ranks(2, |group| {
        let work = Background::default();
        work.enter();
        if group.rank() == 1 {
            return (group, Ok(()));
        }
        let waiter = std::thread::spawn(move || {
            std::thread::sleep(4 * SHORT);
            work.end();
        });
        let waited = group.with_timeout(SHORT).barrier();
        waiter.join().unwrap();
        (group, waited)
    });
    assert!(matches!(&outcomes[0].1, Err(Error::Timeout { .. })), "{outcomes:?}");
}

#[test]
fn an_operation_may_have_a_timeout_of_its_own() {
    const OWN: Duration = Duration::from_millis(300);
    type Wait = fn(&ProcessGroup) -> Result<(), Error>;
    let waits: [(&str, Wait); 5] = [
        ("barrier", |group| group.barrier()),
        ("recv", |group| group.recv_with_tag(&mut [0_u8], 1, 7)),
        ("recv from any rank", |group| group.recv_any(&mut [0_u8], 7).map(drop)),
        ("recv", |group| {
            let work = group.start(Lane::From(1, 0), "recv", |group| group.recv(&mut [0_u8], 1))?;
            work.wait()
        }),
        ("all_reduce", |group| {
            let work = group.start(Lane::Collectives, "all_reduce", |group| {
                group.all_reduce(&mut [0_f32], ReduceOp::Sum)
            })?;
            work.wait()
        }),
    ];
    for (name, wait) in waits {
        let outcomes = ranks(2, |group| {
            let impatient = group.with_timeout(OWN);
            group.barrier().unwrap();
            let error = (group.rank() == 0).then(|| wait(&impatient).unwrap_err());
            (group, error)
        });
        let Some(Error::Timeout { operation, timeout, .. }) = &outcomes[0].1 else {
            panic!("{name}: {outcomes:?}")
        };
        assert!(*timeout == OWN && operation.starts_with(name), "{name}: {outcomes:?}");
        assert_eq!(outcomes[0].0.timeout(), TIMEOUT);
    }
    ranks(2, |group| {
        let pair = group.with_timeout(OWN).duplicate().unwrap();
        assert_eq!((pair.timeout(), group.timeout()), (OWN, TIMEOUT));
    });
}

#[test]
fn a_mismatch_is_one_on_all_ranks_and_stays_one() {
    ranks(3, |group| {
        let error = match group.rank() {
            1 => group.all_reduce(&mut [0_i64][..], ReduceOp::Sum).unwrap_err(),
            _ => group.barrier().unwrap_err(),
        };
        assert!(error.is_mismatch(), "{error}");
        let later = group.barrier().unwrap_err();
        assert!(matches!(later, Error::Poisoned { .. }) && later.is_mismatch(), "{later}");
    });
    // Whatever the words.
    ranks(2, |group| {
        group.abort("ranks disagree about the next collective");
        let error = group.barrier().unwrap_err();
        assert!(matches!(error, Error::Poisoned { .. }) && !error.is_mismatch(), "{error}");
    });
}

#[test]
fn a_rank_that_leaves_is_an_error_for_the_others() {
    // By dropping its handle, by a panic, by aborting the group.
    let left = |error: &Error| match error {
        Error::PeerLost { peer, .. } => assert!(peer.contains("rank 1 "), "{peer}"),
        other => panic!("{other}"),
    };
    let wait = |group: &ProcessGroup| match group.rank() {
        0 => group.recv(&mut [0_i64], 1).unwrap_err(),
        _ => group.barrier().unwrap_err(),
    };
    ranks(3, |group| match group.rank() {
        1 => drop(group),
        _ => left(&wait(&group)),
    });
    ranks(3, |group| match group.rank() {
        1 => {
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                let _member = group;
                panic!("on purpose");
            }));
            assert!(panicked.is_err());
        }
        _ => left(&wait(&group)),
    });
    ranks(3, |group| match group.rank() {
        1 => group.abort("on purpose"),
        _ => {
            let error = group.barrier().unwrap_err().to_string();
            assert!(error.contains("rank 1 aborted the group: on purpose"), "{error}");
        }
    });
}

/// Ranks of several jobs of a process do not mix.
#[test]
fn jobs_are_apart() {
    let total = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for job in 0..3_i64 {
            let total = &total;
            scope.spawn(move || {
                ranks(2, |group| {
                    let mut sum = [job];
                    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                    assert_eq!(sum, [2 * job]);
                    total.fetch_add(1, Ordering::Relaxed);
                });
            });
        }
    });
    assert_eq!(total.into_inner(), 6);
    assert!(ProcessGroup::in_process(0).is_err());
}
