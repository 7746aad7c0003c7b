use std::cell::Cell;

use super::*;

thread_local! {
    /// The bytes that this thread writes to memories before it is killed, as it were.
    static LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Returns those of these bytes that are still written.
pub fn until_killed(bytes: &[u8]) -> &[u8] {
    let written = LEFT.get().min(bytes.len());
    LEFT.set(LEFT.get() - written);
    &bytes[..written]
}

/// The record of `length` bytes that a rank alone has copied at a step.
pub fn record(step: usize, length: u64) -> Record {
    let names = vec!["file".to_owned()];
    let stamp =
        Stamp { format: 0, step, number: step as u64, nonce: 0, holders: 1, follows: false, names };
    let blocks = vec![Block { file: 0, start: 0, length }];
    Record { stamp, folder: None, holder: Some(0), start: 0, blocks, sums: Vec::new() }
}

fn bytes(step: usize, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 31 + step * 7) as u8).collect()
}

/// Returns the memory as a process finds it that starts now.
fn reopened(memory: &Memory) -> Memory {
    Memory::of(memory.file.try_clone().unwrap(), memory.path.clone())
}

/// Checks that a process that starts now finds these steps, and the bytes of each.
#[track_caller]
fn finds(memory: &Memory, expected: &[(usize, usize)]) {
    let memory = reopened(memory);
    let mut found = memory.generations().unwrap();
    found.sort_by_key(|found| found.record.stamp.step);
    let steps: Vec<_> = found.iter().map(|found| found.record.stamp.step).collect();
    assert_eq!(steps, expected.iter().map(|(step, _)| *step).collect::<Vec<_>>());
    for (Generation { record, .. }, &(step, length)) in found.iter().zip(expected) {
        assert!(memory.is_whole(record).unwrap(), "step {step}");
        let mut read = vec![0; length];
        memory.file.read_exact_at(&mut read, record.start).unwrap();
        assert!(read == bytes(step, length), "step {step} has other bytes");
    }
}

fn save(memory: &mut Memory, step: usize, length: usize) {
    memory.begin(length as u64).unwrap();
    memory.push(&bytes(step, length));
    let sealed = memory.seal(record(step, length as u64)).unwrap();
    memory.commit(&sealed).unwrap();
    memory.keep(Some(sealed));
}

#[test]
fn a_process_that_ends_in_a_save_leaves_the_generation_before() {
    let mut memory = Memory::own().unwrap();
    finds(&memory, &[]);
    let length = PIECE + 10_000;
    for step in 1..6 {
        let before: &[_] = if step == 1 { &[] } else { &[(step - 1, length)] };
        memory.begin(length as u64).unwrap();
        finds(&memory, before);
        let new = bytes(step, length);
        memory.push(&new[..length / 2]);
        finds(&memory, before);
        memory.push(&new[length / 2..]);
        finds(&memory, before);
        let sealed = memory.seal(record(step, length as u64)).unwrap();
        finds(&memory, before);
        memory.commit(&sealed).unwrap();
        finds(&memory, &[before, &[(step, length)]].concat());
        // Another rank may not have committed it: a process that starts now keeps the one before.
        let mut next = reopened(&memory);
        next.keep(next.generations().unwrap().into_iter().find(|found| *found != sealed));
        if step % 2 == 0 {
            next.begin(length as u64).unwrap();
            next.push(&bytes(step + 1, length));
            finds(&next, before);
            memory = reopened(&next);
            memory.keep(memory.generations().unwrap().pop());
            save(&mut memory, step, length);
        } else {
            memory.keep(Some(sealed));
        }
    }
}

#[test]
fn a_process_that_is_killed_after_any_byte_leaves_this_generation_or_the_one_before() {
    let all = [(1, 300), (2, 200), (3, 250)];
    let mut at = 0;
    let mut is_killed = true;
    while is_killed {
        let mut memory = Memory::own().unwrap();
        save(&mut memory, 1, 300);
        save(&mut memory, 2, 200);
        LEFT.set(at);
        save(&mut memory, 3, 250);
        is_killed = LEFT.replace(usize::MAX) == 0;
        // The next process keeps the newest one, and saves beside it.
        let mut next = reopened(&memory);
        let found = next.generations().unwrap();
        let is_there = |step| found.iter().any(|found| found.record.stamp.step == step);
        assert!(is_there(2) && (is_there(3) || is_killed), "after {at} bytes");
        let expected: Vec<_> = all.into_iter().filter(|(step, _)| is_there(*step)).collect();
        finds(&next, &expected);
        let newest = found.into_iter().max_by_key(|found| found.record.stamp.step);
        next.keep(newest);
        save(&mut next, 4, 250);
        finds(&next, &[expected[expected.len() - 1], (4, 250)]);
        at += 1;
    }
    assert!(at > 48 + 250 + 48, "the last save has written {at} bytes");
}

#[test]
fn a_wrong_byte_is_found_wherever_it_is() {
    let mut memory = Memory::own().unwrap();
    save(&mut memory, 1, 5000);
    save(&mut memory, 2, PIECE + BLOCK + 5);
    let generation = memory.kept.clone().unwrap();
    let end = generation.bytes.end;
    let record = generation.record.end()..end;
    let header = (generation.slot * HEADER) as u64..(generation.slot * HEADER) as u64 + 48;
    for at in header.chain(record) {
        let mut byte = [0];
        memory.file.read_exact_at(&mut byte, at).unwrap();
        memory.file.write_all_at(&[!byte[0]], at).unwrap();
        finds(&memory, &[(1, 5000)]);
        memory.file.write_all_at(&byte, at).unwrap();
    }
    let generation = &generation.record;
    for at in [0, BLOCK - 1, BLOCK, PIECE - 1, PIECE, PIECE + BLOCK + 4] {
        let at = generation.start + at as u64;
        let mut byte = [0];
        memory.file.read_exact_at(&mut byte, at).unwrap();
        memory.file.write_all_at(&[!byte[0]], at).unwrap();
        assert!(!memory.is_whole(generation).unwrap(), "byte {at}");
        memory.file.write_all_at(&byte, at).unwrap();
    }
    finds(&memory, &[(1, 5000), (2, PIECE + BLOCK + 5)]);
    memory.file.set_len(end - 1).unwrap();
    finds(&memory, &[(1, 5000)]);
}

#[test]
fn the_generation_that_is_kept_is_never_overwritten() {
    let mut memory = Memory::own().unwrap();
    let most = 60_000;
    let mut length = 0;
    for step in 1..300 {
        let last = length;
        // Often the same as before, as in a training.
        length = if step % 3 == 0 { (step * step * 7919) % most } else { length };
        memory.begin(length as u64).unwrap();
        memory.push(&vec![0; length]);
        if step > 1 {
            finds(&memory, &[(step - 1, last)]);
        }
        save(&mut memory, step, length);
        let expected = [(step - 1, last), (step, length)];
        finds(&memory, if step == 1 { &expected[1..] } else { &expected });
        let bytes = memory.file.metadata().unwrap().len();
        assert!(bytes < 3 * (most as u64 + 3 * FIRST), "{bytes} bytes at step {step}");
    }
}
