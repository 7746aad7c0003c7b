//! Checkpoints of ranks that are threads.

use std::fs;
use std::io::Write;
use std::path::Path;

use flow_tensor::ProcessGroup;
use tch::{Device, Kind, Tensor};
use tempfile::{TempDir, tempdir};

mod in_memory;
#[path = "../../tests/it/common/pytorch.rs"]
mod pytorch;

use pytorch::pytorch;

use super::contents::{Contents, FORMAT, INDEX, MODEL};
use super::shards::{Entry, file_name};
use super::{CheckpointError, ShardedCheckpoint, ShardedCheckpoints, merge};
use crate::region::Region;
use crate::{B, NdSbp, Placement, S, Sbp};
use flow_ddp::checkpoint::safetensors::{DTYPES, Header, size};

/// Runs `body` on each of so many ranks.
fn ranks<T: Send>(size: usize, body: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let groups = ProcessGroup::in_process(size).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| body(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A tensor of different numbers, as far as the kind has as many.
fn numbers(shape: &[usize], kind: Kind) -> Tensor {
    let count = shape.iter().product::<usize>() as i64;
    let sizes: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
    let numbers = Tensor::arange(count, (Kind::Float, Device::Cpu)).view(&sizes[..]) + 1;
    match kind {
        Kind::Bool => numbers.remainder(3.0).to_kind(kind),
        Kind::ComplexFloat => Tensor::complex(&numbers, &-(&numbers * 2)),
        _ => numbers.to_kind(kind),
    }
}

fn part(tensor: &Tensor, region: &Region) -> Tensor {
    let ranges = region.0.iter().enumerate();
    ranges.fold(tensor.shallow_clone(), |part, (dim, range)| {
        part.narrow(dim as i64, range.start as i64, range.len() as i64)
    })
}

/// A tensor of [`numbers`] as `rank` has it.
fn entry(
    name: &str,
    (shape, kind): (&[usize], Kind),
    (placement, sbp): &(Placement, NdSbp),
    rank: usize,
) -> Entry {
    let (name, shape) = (format!("{MODEL}{name}"), shape.to_vec());
    let (placement, sbp) = (placement.clone(), sbp.clone());
    let mut entry = Entry { name, kind, shape, placement, sbp, is_plain: false, local: None };
    entry.local = entry.region(rank).map(|region| part(&numbers(&entry.shape, kind), &region));
    entry
}

fn contents(step: usize) -> Contents {
    Contents {
        format: FORMAT,
        step,
        files: Vec::new(),
        sums: Default::default(),
        optimizer: None,
        generator: [0; 2],
        state: serde_json::Value::Null,
        index: Default::default(),
    }
}

fn save_entries(
    checkpoints: &mut ShardedCheckpoints,
    contents: Contents,
    entries: &[Entry],
) -> Result<(), CheckpointError> {
    let saving = checkpoints.begin(contents, entries)?;
    checkpoints.storage.save(saving)
}

/// Every SBP of so many axes, none of them partial, for a tensor of so many dimensions.
fn sbps(axes: usize, dims: usize) -> Vec<NdSbp> {
    let one: Vec<Sbp> = (0..dims).map(S).chain([B]).collect();
    (0..axes).fold(vec![vec![]], |all, _| {
        all.iter()
            .flat_map(|sbp: &NdSbp| one.iter().map(move |&last| [&sbp[..], &[last]].concat()))
            .collect()
    })
}

const SHAPES: [&[usize]; 6] = [&[], &[5], &[4, 6], &[2, 3, 5], &[0, 4], &[1, 2]];

/// Every placement and SBP for a tensor of each shape, and a name.
fn layouts() -> Vec<(String, &'static [usize], (Placement, NdSbp))> {
    let placements = [
        Placement::of([0, 1, 2]).unwrap(),
        Placement::of([[0, 2], [1, 3]]).unwrap(),
        Placement::of([[3, 4], [5, 0]]).unwrap(),
        Placement::of([[1], [5]]).unwrap(),
        Placement::of([4]).unwrap(),
    ];
    let mut layouts = Vec::new();
    for shape in SHAPES {
        for placement in &placements {
            for sbp in sbps(placement.axes(), shape.len()) {
                let name = format!("{shape:?} {placement} {sbp:?}");
                layouts.push((name, shape, (placement.clone(), sbp)));
            }
        }
    }
    layouts
}

/// Saves a tensor in each layout on six ranks, and reads it in each other layout of its shape.
fn read_as_saved(
    layouts: &[(String, &[usize], (Placement, NdSbp))],
    open: impl Fn(&ProcessGroup) -> ShardedCheckpoints + Sync,
) {
    let pairs = ranks(6, |group| {
        let rank = group.rank();
        let kinds = DTYPES.iter().map(|(kind, _)| *kind).cycle();
        let saved = layouts.iter().zip(kinds);
        let entries: Vec<Entry> = saved
            .clone()
            .map(|((name, shape, layout), kind)| entry(name, (shape, kind), layout, rank))
            .collect();
        let mut checkpoints = open(&group);
        save_entries(&mut checkpoints, contents(3), &entries).unwrap();
        let checkpoint = checkpoints.latest::<()>().unwrap().unwrap();
        assert_eq!(checkpoint.step(), 3);

        let (mut expected, mut targets) = (Vec::new(), Vec::new());
        for ((name, shape, _), kind) in saved {
            for (_, _, to) in layouts.iter().filter(|(_, other, _)| other == shape) {
                let mut target = entry(name, (shape, kind), to, rank);
                expected.push(target.local.take());
                target.local = expected.last().unwrap().as_ref().map(|local| {
                    let zeros = local.contiguous().zeros_like();
                    // Half of them are not contiguous.
                    if targets.len() % 2 == 0 && shape.len() > 1 {
                        zeros.transpose(0, 1).contiguous().transpose(0, 1)
                    } else {
                        zeros
                    }
                });
                targets.push(target);
            }
        }
        checkpoint.load_entries(&mut targets).unwrap();
        for (target, expected) in targets.iter().zip(&expected) {
            let bytes =
                |tensor: &Tensor| flow_autograd::bytes(&tensor.contiguous()).unwrap().to_vec();
            let read = target.local.as_ref().map(bytes);
            let to = (&target.placement, &target.sbp);
            assert_eq!(read, expected.as_ref().map(bytes), "{} as {to:?}", target.name);
        }
        targets.len()
    });
    assert!(pairs[0] > 2000, "{}", pairs[0]);
}

#[test]
fn every_pair_of_layouts_and_every_kind() {
    let folder = tempdir().unwrap();
    let layouts = layouts();
    read_as_saved(&layouts, |group| ShardedCheckpoints::open(folder.path(), group).unwrap());
    // What several ranks have is there once.
    let contents = Contents::read(&folder.path().join("step-3")).unwrap();
    let tensors = contents.index.tensors.values();
    let bytes: usize = tensors.map(|saved| size(&saved.dtype, &saved.shape).unwrap()).sum();
    let heads: u64 = (0..6)
        .map(|rank| {
            let file = fs::File::open(folder.path().join("step-3").join(file_name(rank))).unwrap();
            Header::read(&file).unwrap().1
        })
        .sum();
    assert_eq!(contents.files.iter().sum::<u64>(), bytes as u64 + heads);
}

/// Saves a split and a broadcast tensor on two ranks, and returns what a rank has got from `body`
/// with these.
fn on_two_ranks<T: Send>(
    folder: &TempDir,
    body: impl Fn(ShardedCheckpoints, &mut Vec<Entry>, ProcessGroup) -> T + Sync,
) -> Vec<T> {
    let line = Placement::of([0, 1]).unwrap();
    ranks(2, |group| {
        let new = |name, sbp| {
            entry(name, (&[4, 3], Kind::Float), &(line.clone(), vec![sbp]), group.rank())
        };
        let mut entries = vec![new("split", S(0)), new("whole", B)];
        body(ShardedCheckpoints::open(folder.path(), &group).unwrap(), &mut entries, group)
    })
}

fn save(folder: &TempDir, steps: &[usize]) {
    on_two_ranks(folder, |mut checkpoints, entries, _| {
        checkpoints.latest::<()>().unwrap();
        for &step in steps {
            save_entries(&mut checkpoints, contents(step), entries).unwrap();
        }
    });
}

/// The latest step of each rank, and whether its tensors can be read.
fn latest(folder: &TempDir) -> Vec<Result<usize, String>> {
    on_two_ranks(folder, |mut checkpoints, entries, _| {
        let read = |checkpoint: ShardedCheckpoint<()>| {
            checkpoint.load_entries(entries).map(|()| checkpoint.step())
        };
        let latest = checkpoints.latest().map(|latest| latest.expect("a checkpoint"));
        latest
            .and_then(read)
            .map_err(|error| error.to_string().replace(folder.path().to_str().unwrap(), "F"))
    })
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

#[test]
fn the_last_few_are_kept() {
    let folder = tempdir().unwrap();
    save(&folder, &[1, 2, 3, 3]);
    assert_eq!(names(folder.path()), [".checkpoint.lock", "step-2", "step-3"]);
    let files = ["index.json", "rank-00000.safetensors", "rank-00001.safetensors"];
    assert_eq!(names(&folder.path().join("step-3")), files);
    assert_eq!(latest(&folder), [Ok(3), Ok(3)]);
    let errors = on_two_ranks(&folder, |mut checkpoints, entries, _| {
        save_entries(&mut checkpoints, contents(4), entries).unwrap_err().to_string()
    });
    assert!(errors[0].contains("has checkpoints of an earlier training"), "{errors:?}");
    assert!(errors[1].starts_with("rank 0: "), "{errors:?}");
    save(&folder, &[1]);
    assert_eq!(names(folder.path()), [".checkpoint.lock", "step-1"], "3 is of another way");
}

/// Saves step 1, and then fails to save step 2: rank 1 begins it and does `fail` in the folder of
/// what is not whole yet. Returns the error of rank 0.
fn failed_save(folder: &TempDir, fail: impl Fn(&Path, &ProcessGroup) + Sync) -> CheckpointError {
    let partial = folder.path().join(".checkpoint.partial");
    save(folder, &[1]);
    let mut errors = on_two_ranks(folder, |mut checkpoints, entries, group| {
        checkpoints.latest::<()>().unwrap();
        if group.rank() == 0 {
            return save_entries(&mut checkpoints, contents(2), entries).err();
        }
        checkpoints.begin(contents(2), entries).unwrap();
        fail(&partial, &group);
        None
    });
    errors.remove(0).unwrap()
}

#[test]
fn a_rank_that_dies_in_a_save_leaves_the_older_checkpoint() {
    let folder = tempdir().unwrap();
    let error = failed_save(&folder, |partial, _| {
        fs::write(partial.join(file_name(1)), "half a file").unwrap();
    });
    assert!(matches!(error, CheckpointError::Training(flow_ddp::Error::Comm(_))), "{error}");
    // Rank 0 has seen the error, and removed what there was.
    assert_eq!(names(folder.path()), [".checkpoint.lock", "step-1"]);
    assert_eq!(latest(&folder), [Ok(1), Ok(1)]);
}

/// Rank 0 sees that the ranks have lost each other, and removes what there is; rank 1 writes on, as
/// one that is slow does: one file after the other, until the folder is gone.
#[test]
fn a_rank_that_writes_on_after_a_save_has_failed_leaves_nothing() {
    let folder = tempdir().unwrap();
    failed_save(&folder, |partial, group| {
        let open = fs::File::create(partial.join(file_name(1))).unwrap();
        group.abort("rank 1 takes too long");
        let mut files = 0;
        while fs::write(partial.join(format!("file {files}")), "half a file").is_ok() {
            files += 1;
        }
        (&open).write_all(b"the rest").unwrap();
    });
    assert_eq!(names(folder.path()), [".checkpoint.lock", "step-1"]);
    assert_eq!(latest(&folder), [Ok(1), Ok(1)]);
}

#[test]
fn what_cannot_be_saved_is_an_error_on_all_ranks() {
    let folder = tempdir().unwrap();
    save(&folder, &[1]);
    let errors = |spoil: fn(&mut Entry, usize)| {
        on_two_ranks(&folder, |mut checkpoints, entries, group| {
            checkpoints.latest::<()>().unwrap();
            spoil(&mut entries[0], group.rank());
            save_entries(&mut checkpoints, contents(2), entries).unwrap_err().to_string()
        })
    };
    let error = "cannot save model.split: it is of kind QInt8, which safetensors does not have";
    assert_eq!(errors(|entry, _| entry.kind = Kind::QInt8), [error; 2]);
    let error = "cannot save model.split: this rank has [1, 3] of it, not [2, 3]";
    let lose_a_row = |entry: &mut Entry, rank| {
        if rank == 1 {
            entry.local = entry.local.as_ref().map(|local| local.narrow(0, 0, 1));
        }
    };
    assert_eq!(errors(lose_a_row), [&format!("rank 1: {error}"), error]);
    fs::create_dir(folder.path().join("step-2")).unwrap();
    let error = errors(|_, _| ())[0].clone();
    assert!(error.contains("step-2 is no checkpoint of Flow (it has no index.json)"), "{error}");
    assert_eq!(latest(&folder), [Ok(1), Ok(1)]);
}

/// As the state of a parameter that has had a gradient on one rank only.
#[test]
fn ranks_that_save_different_tensors_get_an_error_that_names_one() {
    let folder = tempdir().unwrap();
    save(&folder, &[1]);
    let errors = |spoil: fn(&mut Vec<Entry>, usize)| {
        on_two_ranks(&folder, |mut checkpoints, entries, group| {
            checkpoints.latest::<()>().unwrap();
            spoil(entries, group.rank());
            save_entries(&mut checkpoints, contents(2), entries).unwrap_err().to_string()
        })
    };
    let is = |errors: Vec<String>, has: &str| {
        let error = format!(
            "cannot save model.split: {has}; save the same variables on all ranks, and give a \
             variable a gradient on all of them"
        );
        assert_eq!(errors, [format!("rank 1: {error}"), error]);
    };
    let only_on_1 = errors(|entries, rank| entries.drain(..1 - rank).for_each(drop));
    is(only_on_1, "this rank has it, and rank 0 has not");
    let only_on_0 = errors(|entries, rank| entries.drain(..rank).for_each(drop));
    is(only_on_0, "rank 0 has it, and this rank has not");
    let otherwise = errors(|entries, rank| entries[0].sbp = vec![[S(0), S(1)][rank]]);
    is(otherwise, "its type, shape or layout is not that of rank 0");
    assert_eq!(latest(&folder), [Ok(1), Ok(1)]);
}

#[test]
fn damaged_checkpoints_are_passed_over_or_errors() {
    let folder = tempdir().unwrap();
    save(&folder, &[1, 2]);
    let file = |step: usize, name: &str| folder.path().join(format!("step-{step}")).join(name);
    let second = file(2, "rank-00001.safetensors");
    let bytes = fs::read(&second).unwrap();

    // As long as it was, but not what it was.
    fs::write(&second, [&[255; 8][..], &bytes[8..]].concat()).unwrap();
    let error = "F/step-2/rank-00001.safetensors is damaged: its header cannot have \
                 18446744073709551615 bytes; bring it back, or use another checkpoint";
    assert_eq!(latest(&folder)[0], Err(format!("rank 1: {error}")));
    assert_eq!(latest(&folder)[1], Err(error.to_owned()));

    fs::write(&second, &bytes[..bytes.len() - 1]).unwrap();
    assert_eq!(latest(&folder), [Ok(1), Ok(1)]);
    save(&folder, &[2]);
    assert_eq!(names(folder.path())[1..], ["step-1", "step-2", "step-2.damaged"]);
    fs::remove_dir_all(folder.path().join("step-2")).unwrap();
    fs::rename(folder.path().join("step-2.damaged"), folder.path().join("step-2")).unwrap();

    fs::write(file(1, INDEX), "{").unwrap();
    let error = format!(
        "all checkpoints in F are damaged; remove them to start anew: \
         F/step-2/rank-00001.safetensors is damaged: it has {} of {} bytes; bring it back, or use \
         another checkpoint",
        bytes.len() - 1,
        bytes.len()
    );
    assert_eq!(latest(&folder), [Err(error.clone()), Err(format!("rank 0: {error}"))]);

    fs::write(&second, &bytes).unwrap();
    fs::remove_file(file(2, "rank-00000.safetensors")).unwrap();
    let error = latest(&folder)[0].clone().unwrap_err();
    let missing = "cannot read F/step-2/rank-00000.safetensors: No such file or directory (os \
                   error 2); bring it back, or use another checkpoint";
    assert!(error.ends_with(missing), "{error}");

    fs::write(file(2, INDEX), r#"{"format": 7}"#).unwrap();
    let error = "F/step-2 is of another program: it has not format 2 of Flow's sharded \
                 checkpoints; use what it was saved with, or another folder";
    assert_eq!(latest(&folder)[0], Err(error.to_owned()));
}

/// What `names` of kinds and layouts is merged into, and what it should be.
#[test]
fn merged_tensors_are_the_plain_ones() {
    let folder = tempdir().unwrap();
    let mesh = Placement::of([[2, 0], [1, 3]]).unwrap();
    let layouts = [vec![S(0), S(1)], vec![S(1), S(0)], vec![S(1), B], vec![B, B]];
    // All that tch can read.
    let kinds: Vec<Kind> = DTYPES
        .iter()
        .map(|(kind, _)| *kind)
        .filter(|kind| !matches!(kind, Kind::Float8e5m2 | Kind::Float8e4m3fn | Kind::ComplexFloat))
        .collect();
    ranks(4, |group| {
        let mut entries = Vec::new();
        for &kind in &kinds {
            for sbp in &layouts {
                let (name, layout) = (format!("{kind:?}.{sbp:?}"), (mesh.clone(), sbp.clone()));
                entries.push(entry(&name, (&[5, 3], kind), &layout, group.rank()));
            }
        }
        let whole = (mesh.clone(), vec![B, B]);
        entries.push(entry("one", (&[], Kind::Float), &whole, group.rank()));
        entries.push(entry("none", (&[0, 2], Kind::Half), &whole, group.rank()));
        // 36 MB, in several blocks, along the second dimension too.
        let large = (mesh.clone(), vec![S(1), S(2)]);
        entries.push(entry("large", (&[2, 9, 500_001], Kind::Float), &large, group.rank()));
        let mut other = entry("", (&[1], Kind::Float), &whole, group.rank());
        other.name = "optimizer.0.exp_avg".into();
        entries.push(other);
        let mut checkpoints = ShardedCheckpoints::open(folder.path(), &group).unwrap();
        save_entries(&mut checkpoints, contents(1), &entries).unwrap();
    });
    let out = folder.path().join("model.safetensors");
    merge(folder.path().join("step-1"), &out).unwrap();
    let merged = Tensor::read_safetensors(&out).unwrap();
    assert_eq!(merged.len(), kinds.len() * layouts.len() + 3);
    for (name, tensor) in &merged {
        let expected = match &name[..] {
            "one" => numbers(&[], Kind::Float),
            "none" => numbers(&[0, 2], Kind::Half),
            "large" => numbers(&[2, 9, 500_001], Kind::Float),
            _ => numbers(&[5, 3], tensor.kind()),
        };
        assert!(*tensor == expected && tensor.size() == expected.size(), "{name}");
    }
    assert_eq!(names(folder.path()), [".checkpoint.lock", "model.safetensors", "step-1"]);
    read_by_pytorch(&out);

    let error = merge(folder.path(), &out).unwrap_err().to_string();
    assert!(
        error.contains("give the folder of one checkpoint, as checkpoints/step-100"),
        "{error}"
    );
    fs::remove_file(folder.path().join("step-1").join(file_name(3))).unwrap();
    let error = merge(folder.path().join("step-1"), folder.path().join("other")).unwrap_err();
    assert!(error.to_string().contains("rank-00003.safetensors"), "{error}");
    assert_eq!(names(folder.path()), [".checkpoint.lock", "model.safetensors", "step-1"]);
}

/// PyTorch has the same of the merged file.
fn read_by_pytorch(file: &Path) {
    let program = r#"
import sys
import merged, torch
tensors = merged.load(sys.argv[1])
for name, tensor in tensors.items():
    expected = torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape) + 1
    if tensor.dtype == torch.bool:
        expected = expected % 3
    assert torch.equal(tensor, expected.to(tensor.dtype)), name
print(len(tensors))
"#;
    if let Some(printed) = pytorch(program, file) {
        assert_eq!(printed, "43\n");
    }
}
