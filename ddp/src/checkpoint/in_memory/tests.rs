use std::thread;

use super::*;

/// A rank's part of what is saved at a step.
fn part(rank: usize, step: usize) -> Vec<u8> {
    vec![(10 * step + rank) as u8; 3000 * rank]
}

/// Saves a step as far as this rank comes before all are killed: to 0, the begin of a copy, or to 4, the
/// commit.
fn save(
    (in_memory, memory): &mut (InMemory, Memory),
    group: &ProcessGroup,
    step: usize,
    stage: usize,
) {
    let bytes = part(group.rank(), step);
    let start = (0..group.rank()).map(|rank| part(rank, step).len() as u64).sum();
    let length = bytes.len() as u64;
    let blocks: Vec<_> =
        (length > 0).then_some(Block { file: 0, start, length }).into_iter().collect();
    let (_, all) = exchange(group, Ok(()), |()| memory.ready(length)).unwrap();
    let record = in_memory.record(group.rank(), &all, step, vec!["file".into()], blocks);
    if stage == 0 {
        return;
    }
    memory.begin(length).unwrap();
    memory.push(&bytes[..bytes.len() / 2]);
    if stage == 1 {
        return;
    }
    memory.push(&bytes[bytes.len() / 2..]);
    if stage == 2 {
        return;
    }
    let sealed = memory.seal(record).unwrap();
    if stage == 3 {
        return;
    }
    memory.commit(&sealed).unwrap();
    memory.keep(Some(sealed));
}

/// What the ranks find, read by each of them.
fn found(
    (in_memory, memory): &mut (InMemory, Memory),
    group: &ProcessGroup,
) -> Option<(usize, Vec<u8>)> {
    let found = in_memory.latest(memory, group).unwrap()?;
    let step = found.step;
    let files = found.open(group, |_| true).unwrap();
    assert_eq!((files.len(), &files[0].path), (1, &name(step).join("file")));
    let mut bytes = vec![0; files[0].length() as usize];
    files[0].read_exact_at(&mut bytes, 0).unwrap();
    Some((step, bytes))
}

fn in_group(memories: &[PathBuf], rank: impl Fn(&mut (InMemory, Memory), ProcessGroup) + Sync) {
    in_group_of(memories, memories, rank);
}

/// Runs ranks with these memories, of all that flow-launch has.
fn in_group_of(
    memories: &[PathBuf],
    all: &[PathBuf],
    rank: impl Fn(&mut (InMemory, Memory), ProcessGroup) + Sync,
) {
    let groups = ProcessGroup::in_process(memories.len()).unwrap();
    thread::scope(|scope| {
        for (group, path) in groups.into_iter().zip(memories) {
            let rank = &rank;
            scope.spawn(move || rank(&mut over(path.clone(), all.to_vec()).unwrap(), group));
        }
    });
}

/// All ranks get as far as each may when one is killed, and start anew: some with other ranks.
#[test]
fn ranks_find_the_last_step_that_all_have_or_the_one_before() {
    let ranks = 3;
    let owners: Vec<_> = (0..ranks).map(|_| Memory::own().unwrap()).collect();
    let mut memories: Vec<_> = owners.iter().map(|owner| owner.path.clone()).collect();
    let whole = |step| (0..ranks).flat_map(|rank| part(rank, step)).collect::<Vec<u8>>();
    let mut last = None;
    let mut step = 0;
    // All combinations of stages that can be: none commits before all have sealed.
    for combination in 0..5_usize.pow(3) {
        let stages = [combination % 5, combination / 5 % 5, combination / 25];
        let least = stages.iter().min().copied().unwrap_or_default();
        if stages.contains(&4) && least < 3 {
            continue;
        }
        step += 1;
        let before = last;
        in_group(&memories, |own, group| {
            let expected = before.map(|step| (step, whole(step)));
            assert_eq!(found(own, &group), expected, "before step {step}");
            assert_eq!(own.0.in_part, None, "before step {step}");
            save(own, &group, step, stages[group.rank()]);
        });
        // Rank 0 has no bytes: it need not have committed.
        if stages[1] == 4 && stages[2] == 4 {
            last = Some(step);
        }
        // Ranks are others then, and may see it from elsewhere.
        let expected = last.map(|step| (step, whole(step)));
        memories.reverse();
        in_group(&memories, |own, group| assert_eq!(found(own, &group), expected));
        memories.reverse();
    }
    assert!(step > 25 && last.is_some());
    // Without a rank that has something there is nothing; without one that has not, there is all.
    in_group(&memories[..2], |own, group| {
        assert_eq!(found(own, &group), None);
        assert_eq!(own.0.in_part, last);
    });
    in_group(&memories[1..], |own, group| {
        assert_eq!(found(own, &group), last.map(|step| (step, whole(step))));
    });
}

#[test]
fn what_missing_ranks_have_is_read_and_replaced_by_the_next_save() {
    let owners: Vec<_> = (0..4).map(|_| Memory::own().unwrap()).collect();
    let all: Vec<_> = owners.iter().map(|owner| owner.path.clone()).collect();
    let whole = |ranks, step| {
        let bytes = (0..ranks).flat_map(|rank| part(rank, step)).collect::<Vec<u8>>();
        Some((step, bytes))
    };
    in_group(&all, |own, group| save(own, &group, 1, 4));
    // Others are left each time, then fewer, and then all are there again.
    let first_two = all[..2].to_vec();
    let last_two = vec![all[3].clone(), all[2].clone()];
    let mut expected = whole(4, 1);
    for (index, present) in [first_two, last_two, all[1..].to_vec(), all.clone()].iter().enumerate()
    {
        let step = index + 2;
        in_group_of(present, &all, |own, group| {
            assert_eq!(found(own, &group), expected, "before step {step}");
            group.barrier().unwrap();
            save(own, &group, step, 4);
        });
        expected = whole(present.len(), step);
    }
    // The memory of a missing rank is damaged.
    in_group_of(&all[..3], &all, |own, group| {
        assert_eq!(found(own, &group), expected);
        group.barrier().unwrap();
        if group.rank() == 0 {
            let missing = over(all[3].clone(), vec![]).unwrap().1;
            let at = missing.generations().unwrap()[0].record.start;
            missing.file.write_all_at(b"x", at).unwrap();
        }
        group.barrier().unwrap();
        assert_eq!(found(own, &group), whole(3, 4));
    });
}

#[test]
fn a_damaged_part_is_not_resumed_and_another_folders_is_not_seen() {
    let owners: Vec<_> = (0..3).map(|_| Memory::own().unwrap()).collect();
    let memories: Vec<_> = owners.iter().map(|owner| owner.path.clone()).collect();
    in_group(&memories, |own, group| {
        for step in [1, 2] {
            save(own, &group, step, 4);
            group.barrier().unwrap();
        }
    });
    in_group(&memories, |own, group| {
        let (in_memory, memory) = own;
        let error =
            in_memory.check_read(memory).map(|()| found(own, &group)).unwrap_err().to_string();
        assert!(error.contains("call latest first"), "{error}");
        own.0.folder = Some("folder".into());
        assert_eq!(found(own, &group), None);
        own.0.folder = None;
        assert_eq!(found(own, &group).unwrap().0, 2);
        group.barrier().unwrap();
        if group.rank() == 1 {
            let generations = own.1.generations().unwrap();
            let newest = generations.iter().find(|found| found.record.stamp.step == 2).unwrap();
            own.1.file.write_all_at(b"x", newest.record.start + 7).unwrap();
        }
        group.barrier().unwrap();
        assert_eq!(found(own, &group).unwrap().0, 1);
    });
}

/// As of flow_torch.checkpoint, which leaves a hole of a terabyte: nobody may fill that.
#[test]
fn what_another_program_has_left_takes_no_memory() {
    let owners: Vec<_> = (0..2).map(|_| Memory::own().unwrap()).collect();
    let memories: Vec<_> = owners.iter().map(|owner| owner.path.clone()).collect();
    owners.iter().for_each(|owner| owner.file.write_all_at(b"record", 1 << 40).unwrap());
    in_group(&memories, |own, group| {
        assert_eq!(found(own, &group), None);
        save(own, &group, 1, 4);
    });
    in_group(&memories, |own, group| assert_eq!(found(own, &group).unwrap().0, 1));
    assert!(owners.iter().all(|owner| owner.file.metadata().unwrap().len() < 1 << 20));
}

#[test]
fn memory_that_is_not_the_launchers_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for path in [file.path().to_owned(), "/proc/self/fd/0".into(), "/proc/0/fd/7".into()] {
        let error =
            over(path.clone(), vec![]).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(
            error.contains("cannot open the memory") && error.contains("flow-launch"),
            "{error}"
        );
    }
    let owner = Memory::own().unwrap();
    let _opened = over(owner.path.clone(), vec![]).unwrap();
}
