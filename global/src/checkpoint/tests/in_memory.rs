//! Checkpoints in memory that outlives the ranks, which are threads.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use flow_ddp::checkpoint::in_memory::over;
use flow_ddp::checkpoint::memory::Memory;
use flow_ddp::checkpoint::storage::Storage;

use super::*;

/// The memory that flow-launch has for its workers.
struct Launcher(Vec<Memory>);

impl Launcher {
    fn new(ranks: usize) -> Self {
        Self((0..ranks).map(|_| Memory::own().unwrap()).collect())
    }

    /// Opens the checkpoints of the rank. Its memory is that of worker `rank + first`.
    fn open(&self, group: &ProcessGroup, first: usize) -> ShardedCheckpoints {
        let paths: Vec<PathBuf> = self.0.iter().map(|memory| memory.path.clone()).collect();
        let own = paths[(group.rank() + first) % paths.len()].clone();
        let storage = Storage::in_memory(over(own, paths), group, &[INDEX]).unwrap();
        ShardedCheckpoints { storage, group: group.clone() }
    }
}

#[test]
fn every_pair_of_layouts_and_every_kind_in_memory() {
    let launcher = Launcher::new(6);
    read_as_saved(&layouts(), |group| launcher.open(group, 0));
}

/// Numbers that are drawn.
struct Draws(u64);

impl Draws {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % limit
    }

    fn sbp(&mut self, dims: usize) -> NdSbp {
        (0..2).map(|_| [B, S(self.below(dims.max(1)))][self.below(2).min(dims)]).collect()
    }

    /// A mesh of some of so many ranks, often with an axis of one.
    fn placement(&mut self, ranks: usize) -> Placement {
        let mut chosen: Vec<usize> = (0..ranks).collect();
        for place in 1..ranks {
            chosen.swap(place, self.below(place + 1));
        }
        let rows = 1 + self.below(ranks);
        let columns = 1 + self.below(ranks / rows);
        let mesh: Vec<_> = chosen.chunks(columns).take(rows).map(<[usize]>::to_vec).collect();
        Placement::of(mesh).unwrap()
    }
}

/// The tensors of a step, as a rank of so many has them in these layouts.
fn drawn(step: usize, layouts: u64, group: &ProcessGroup) -> Vec<Entry> {
    let mut draws = Draws(step as u64);
    let mut layouts = Draws(layouts);
    let tensors = (0..1 + draws.below(8)).map(|number| {
        let dims = draws.below(4);
        let shape: Vec<usize> = (0..dims).map(|_| draws.below(6)).collect();
        let (kind, _) = DTYPES[draws.below(DTYPES.len())];
        let layout = (layouts.placement(group.world_size()), layouts.sbp(dims));
        entry(&number.to_string(), (&shape, kind), &layout, group.rank())
    });
    tensors.collect()
}

fn bytes(entry: &Entry) -> Option<Vec<u8>> {
    let local = entry.local.as_ref()?.contiguous();
    Some(flow_autograd::bytes(&local).unwrap().to_vec())
}

/// Jobs of other ranks than before, with other layouts, go on from what the last one has saved.
#[test]
fn other_ranks_go_on_from_memory() {
    for seed in 0..60 {
        let launcher = Launcher::new(6);
        let mut draws = Draws(seed);
        let mut last = None;
        for _ in 0..5 {
            let size = 1 + draws.below(6);
            let first = draws.below(6);
            let layouts = draws.below(1 << 30) as u64;
            let steps = draws.below(3);
            let (text, begin) = (format!("seed {seed}"), last.map_or(1, |last| last + 1));
            ranks(size, |group| {
                let mut checkpoints = launcher.open(&group, first);
                let found = checkpoints.latest::<()>().unwrap();
                assert_eq!(found.as_ref().map(ShardedCheckpoint::step), last, "{text}");
                if let Some(found) = found {
                    let mut read = drawn(found.step(), layouts, &group);
                    let expected: Vec<_> = read.iter().map(bytes).collect();
                    for local in read.iter_mut().filter_map(|entry| entry.local.as_mut()) {
                        *local = local.contiguous().zeros_like();
                    }
                    found.load_entries(&mut read).unwrap();
                    for (entry, expected) in read.iter().zip(expected) {
                        assert_eq!(bytes(entry), expected, "{text}: {}", entry.name);
                    }
                }
                for step in begin..begin + steps {
                    let entries = drawn(step, layouts + step as u64, &group);
                    let saving = checkpoints.begin(contents(step), &entries).unwrap();
                    checkpoints.storage.start(saving).unwrap();
                    checkpoints.wait().unwrap();
                }
            });
            last = last.max((begin + steps).checked_sub(1).filter(|&step| step > 0));
        }
    }
}

/// Saves steps on two ranks.
fn save_in_memory(checkpoints: &mut ShardedCheckpoints, group: &ProcessGroup, steps: &[usize]) {
    for &step in steps {
        let entries = drawn(step, 0, group);
        let saving = checkpoints.begin(contents(step), &entries).unwrap();
        checkpoints.storage.save(saving).unwrap();
    }
}

fn step(checkpoints: &mut ShardedCheckpoints) -> Option<usize> {
    checkpoints.latest::<()>().unwrap().map(|found| found.step())
}

#[test]
fn damaged_memory_leaves_the_checkpoint_before() {
    for damaged in 0..2 {
        let launcher = Launcher::new(2);
        ranks(2, |group| {
            let mut checkpoints = launcher.open(&group, 0);
            save_in_memory(&mut checkpoints, &group, &[1, 2]);
            group.barrier().unwrap();
            if group.rank() == damaged {
                let memory = &launcher.0[damaged];
                let mut generations = memory.generations().unwrap();
                generations.sort_by_key(|found| found.record.stamp.step);
                let newest = generations.pop().unwrap().record;
                memory.file.write_all_at(b"?", newest.start + 9).unwrap();
            }
            group.barrier().unwrap();
            assert_eq!(step(&mut checkpoints), Some(1));
            save_in_memory(&mut checkpoints, &group, &[2]);
            assert_eq!(step(&mut checkpoints), Some(2));
        });
    }
}

#[test]
fn two_saves_replace_what_was_found() {
    let launcher = Launcher::new(2);
    ranks(2, |group| {
        let mut checkpoints = launcher.open(&group, 0);
        save_in_memory(&mut checkpoints, &group, &[1]);
        let found = checkpoints.latest::<()>().unwrap().unwrap();
        let mut entries = drawn(1, 0, &group);
        save_in_memory(&mut checkpoints, &group, &[2]);
        found.load_entries(&mut entries).unwrap();
        save_in_memory(&mut checkpoints, &group, &[3]);
        let error = found.load_entries(&mut entries).unwrap_err().to_string();
        assert!(
            error.contains("two checkpoints were saved since latest has returned it"),
            "{error}"
        );
    });
}

#[test]
fn the_newest_is_found_in_memory_or_in_the_folder() {
    let folder = tempdir().unwrap();
    let launcher = Launcher::new(2);
    let two_ranks = |body: &(dyn Fn(ShardedCheckpoints, ProcessGroup) + Sync)| {
        ranks(2, |group| {
            let checkpoints = launcher.open(&group, 0).and_folder(folder.path()).unwrap().keep(3);
            body(checkpoints, group);
        });
    };
    two_ranks(&|mut both, group| {
        assert_eq!(step(&mut both), None);
        save_in_memory(&mut both, &group, &[1, 2, 3, 4]);
    });
    assert_eq!(names(folder.path())[1..], ["step-2", "step-3", "step-4"]);
    // What is in the folder is as without memory.
    let files = names(&folder.path().join("step-4"));
    ranks(2, |group| {
        let mut checkpoints = ShardedCheckpoints::open(folder.path(), &group).unwrap().keep(3);
        assert_eq!(step(&mut checkpoints), Some(4));
        save_entries(&mut checkpoints, contents(5), &drawn(5, 0, &group)).unwrap();
        save_entries(&mut checkpoints, contents(4), &drawn(4, 0, &group)).unwrap();
    });
    assert_eq!(names(&folder.path().join("step-4")), files);
    crate::checkpoint::verify(folder.path().join("step-4")).unwrap();
    fs::remove_dir_all(folder.path().join("step-4")).unwrap();
    two_ranks(&|mut both, group| {
        let error = both.begin(contents(6), &drawn(6, 0, &group)).err().unwrap().to_string();
        assert!(error.contains("call latest first"), "{error}");
        let found = both.latest::<()>().unwrap().unwrap();
        assert_eq!((found.step(), found.path), (4, "flow-launch's memory/step-4".into()));
    });
    ranks(2, |group| {
        let mut checkpoints = ShardedCheckpoints::open(folder.path(), &group).unwrap();
        assert_eq!(step(&mut checkpoints), Some(3));
        save_entries(&mut checkpoints, contents(7), &drawn(7, 0, &group)).unwrap();
    });
    two_ranks(&|mut both, _| assert_eq!(step(&mut both), Some(7)));
    fs::write(folder.path().join("step-7").join(INDEX), "{").unwrap();
    two_ranks(&|mut both, _| assert_eq!(step(&mut both), Some(4)));
    // Memory of another folder's training is not seen.
    ranks(2, |group| assert_eq!(step(&mut launcher.open(&group, 0)), None));
}
