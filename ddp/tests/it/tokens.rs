//! Token files and their windows.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use flow_ddp::{
    DataLoader, Dataset, DistributedSampler, LoaderError, TokenDataset, TokenError, TokenFile,
    TokenKind,
};
use proptest::prelude::*;
use tch::{Cuda, Device, Kind, Tensor};
use tempfile::{TempDir, tempdir};

/// Writes a file of these tokens.
fn write(folder: &TempDir, name: &str, tokens: &[u32], kind: TokenKind) -> PathBuf {
    let bytes: Vec<u8> = match kind {
        TokenKind::U16 => tokens.iter().flat_map(|&token| (token as u16).to_le_bytes()).collect(),
        TokenKind::U32 => tokens.iter().flat_map(|&token| token.to_le_bytes()).collect(),
    };
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    path
}

fn rows(tensor: &Tensor) -> Vec<Vec<i64>> {
    tensor.try_into().unwrap()
}

#[test]
fn tokens_are_numbers_of_their_type_the_low_byte_first() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("tokens");
    fs::write(&path, [1, 2, 255, 255, 0, 0, 7, 128]).unwrap();
    let file = TokenFile::open(&path, TokenKind::U16).unwrap();
    assert_eq!((file.len(), file.read(0, 4).unwrap()), (4, vec![513, 65535, 0, 32775]));
    let file = TokenFile::open(&path, TokenKind::U32).unwrap();
    assert_eq!((file.len(), file.read(1, 1).unwrap()), (2, vec![2_147_942_400]));
    assert!(file.read(2, 0).unwrap().is_empty() && !file.is_empty());
}

#[test]
fn windows_of_several_files_are_inputs_and_the_tokens_after_them() {
    let folder = tempdir().unwrap();
    let files = [("a", 0..9), ("b", 100..104), ("c", 200..207)].map(|(name, tokens)| {
        let path = write(&folder, name, &Vec::from_iter(tokens), TokenKind::U16);
        TokenFile::open(path, TokenKind::U16).unwrap()
    });
    let windows = TokenDataset::new(files.into(), 4).unwrap();
    assert_eq!(windows.len(), 3);
    let (inputs, targets) = windows.batch(&[2, 0, 1]).unwrap();
    assert_eq!((inputs.kind(), inputs.size()), (Kind::Int64, vec![3, 4]));
    assert_eq!(rows(&inputs), [[200, 201, 202, 203], [0, 1, 2, 3], [4, 5, 6, 7]]);
    assert_eq!(rows(&targets), [[201, 202, 203, 204], [1, 2, 3, 4], [5, 6, 7, 8]]);
    assert!(targets.is_contiguous());
    let windows = windows.stride(1);
    assert_eq!(windows.len(), 5 + 3);
    assert_eq!(rows(&windows.batch(&[4, 5]).unwrap().1), [[5, 6, 7, 8], [201, 202, 203, 204]]);
}

#[test]
fn a_file_that_is_wrong_is_an_error_that_names_it() {
    let folder = tempdir().unwrap();
    let missing = folder.path().join("missing");
    let error = TokenFile::open(&missing, TokenKind::U16).unwrap_err().to_string();
    let expected = format!("cannot open the token file {}: No such file", missing.display());
    assert!(error.starts_with(&expected), "{error}");

    let path = write(&folder, "tokens", &[1, 2, 3], TokenKind::U16);
    let error = TokenFile::open(&path, TokenKind::U32).unwrap_err().to_string();
    let expected =
        format!("{} has 6 bytes, it should have a multiple of 4 for tokens of U32", path.display());
    assert_eq!(error, expected);
    let open = || TokenFile::open(&path, TokenKind::U16).unwrap();
    let error = open().read(1, 3).unwrap_err().to_string();
    let expected = format!("cannot read tokens 1 to 4 of {}: unexpected end", path.display());
    assert!(error.starts_with(&expected) && error.ends_with("it had 3 when it was opened"));
    assert!(open().read(usize::MAX, 2).is_err());

    assert!(matches!(TokenDataset::new(vec![open()], 0), Err(TokenError::BlockSize)));
    let error = TokenDataset::new(vec![open(), open()], 3).unwrap_err().to_string();
    assert_eq!(
        error,
        "the longest of 2 token file(s) has 3 tokens, it should have more than the block size 3"
    );
    assert!(TokenDataset::new(vec![], 3).is_err());
    let error = TokenDataset::new(vec![open()], 1).unwrap().batch(&[0, 2]).unwrap_err();
    assert_eq!(error.to_string(), "there is no window 2, it should be below 2");
}

#[test]
fn a_file_that_is_cut_while_it_is_read_is_an_error() {
    let folder = tempdir().unwrap();
    let path = write(&folder, "tokens", &Vec::from_iter(0..5000), TokenKind::U16);
    let file = TokenFile::open(&path, TokenKind::U16).unwrap();
    let windows = Arc::new(TokenDataset::new(vec![file], 9).unwrap());
    let sampler = DistributedSampler::with_replicas(windows.len(), 1, 0).unwrap().shuffle(false);
    fs::File::options().write(true).open(&path).unwrap().set_len(2000).unwrap();
    let batches: Vec<_> = DataLoader::new(&windows, &sampler, 10).into_iter().collect();
    assert_eq!(batches.len(), 12);
    let error = batches.last().unwrap().as_ref().unwrap_err();
    assert!(matches!(error, LoaderError::Dataset { .. }), "{error}");
    let expected = format!(" of {}: ", path.display());
    assert!(error.to_string().contains(&expected), "{error}");
}

/// On a CPU batches are as they were. Where there is no GPU, asking for one is an error.
#[test]
fn workers_bring_batches_to_the_device() {
    let folder = tempdir().unwrap();
    let path = write(&folder, "tokens", &Vec::from_iter(0..40), TokenKind::U16);
    let load = |device| {
        let file = TokenFile::open(&path, TokenKind::U16).unwrap();
        let windows = Arc::new(TokenDataset::new(vec![file], 3).unwrap().to_device(device));
        let sampler = DistributedSampler::with_replicas(windows.len(), 1, 0).unwrap();
        let sampler = sampler.shuffle(false);
        DataLoader::new(&windows, &sampler, 2).workers(2).into_iter().collect::<Vec<_>>()
    };
    let on_cpu = load(Device::Cpu);
    let first = on_cpu[0].as_ref().unwrap();
    assert_eq!((on_cpu.len(), rows(&first.1)), (7, vec![vec![1, 2, 3], vec![4, 5, 6]]));
    let on_gpu = load(Device::Cuda(0));
    if !Cuda::is_available() {
        assert!(matches!(on_gpu[..], [Err(LoaderError::Dataset { .. })]), "{on_gpu:?}");
        println!("SKIPPED: batches on a GPU: there is none");
        return;
    }
    for (on_gpu, on_cpu) in on_gpu.iter().zip(&on_cpu) {
        let (on_gpu, on_cpu) = (on_gpu.as_ref().unwrap(), on_cpu.as_ref().unwrap());
        assert_eq!((on_gpu.0.device(), on_gpu.1.device()), (Device::Cuda(0), Device::Cuda(0)));
        assert!(on_gpu.0.to_device(Device::Cpu) == on_cpu.0);
        assert!(on_gpu.1.to_device(Device::Cpu) == on_cpu.1);
    }
}

proptest! {
    #[test]
    fn each_token_is_a_target_once(
        lengths in prop::collection::vec(0usize..100, 1..5),
        block_size in 1usize..20,
        is_wide: bool,
    ) {
        let kind = if is_wide { TokenKind::U32 } else { TokenKind::U16 };
        let folder = tempdir().unwrap();
        let mut files = Vec::new();
        let mut expected = Vec::new();
        let mut first = 0;
        for (n, &length) in lengths.iter().enumerate() {
            let tokens: Vec<u32> = (first..first + length as u32).collect();
            first += length as u32;
            let targets = length.saturating_sub(1) / block_size * block_size;
            expected.extend(tokens.iter().skip(1).take(targets).map(|&token| i64::from(token)));
            let path = write(&folder, &n.to_string(), &tokens, kind);
            files.push(TokenFile::open(path, kind).unwrap());
        }
        let Ok(windows) = TokenDataset::new(files, block_size) else {
            prop_assert!(expected.is_empty());
            return Ok(());
        };
        let (inputs, targets) = windows.batch(&Vec::from_iter(0..windows.len())).unwrap();
        prop_assert_eq!(rows(&targets).concat(), &expected[..]);
        prop_assert_eq!(rows(&(inputs + 1)).concat(), expected);
    }
}
