//! The Fashion-MNIST data set: 60,000 training and 10,000 test images of clothes, in ten classes.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::idx::{self, Idx};

/// Number of classes.
pub const CLASSES: usize = 10;

/// The folder into which Debian's package `dataset-fashion-mnist` puts it.
const INSTALLED: &str = "/usr/share/datasets/fashion-mnist";

/// Images with their labels.
pub struct Split {
    /// Grey values, image after image, each row by row.
    pub images: Vec<u8>,
    /// The class of each image, below [`CLASSES`].
    pub labels: Vec<u8>,
    /// Rows of an image.
    pub rows: usize,
    /// Columns of an image.
    pub columns: usize,
}

/// Returns the cache folder of `scripts/setup`; None without a home.
pub fn cache_folder() -> Option<PathBuf> {
    if let Some(folder) = absolute("FLOW_CACHE") {
        return Some(folder);
    }
    let of_user = match absolute("XDG_CACHE_HOME") {
        Some(folder) => folder,
        None => absolute("HOME")?.join(".cache"),
    };
    Some(of_user.join("flow"))
}

/// Returns the folder that a variable names, if its path is absolute.
fn absolute(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).map(PathBuf::from).filter(|folder| folder.is_absolute())
}

/// Returns the folder where Fashion-MNIST is looked for by default: Debian's, or the cache folder
/// of `scripts/setup --data` where that one exists and Debian's does not.
pub fn default_folder() -> PathBuf {
    let installed = PathBuf::from(INSTALLED);
    let cache = cache_folder().map(|cache| cache.join("fashion-mnist"));
    cache.filter(|cache| !installed.is_dir() && cache.is_dir()).unwrap_or(installed)
}

/// Reads the training and the test split from `folder`, in files of their usual names
/// (`train-images-idx3-ubyte`, with or without `.gz`, and so on). MNIST, which has the same names,
/// will do as well.
///
/// # Errors
/// When a file is missing or wrong, or the files do not fit each other.
pub fn load(folder: &Path) -> Result<(Split, Split)> {
    Ok((split(folder, "train")?, split(folder, "t10k")?))
}

fn split(folder: &Path, name: &str) -> Result<Split> {
    let (_, images) = array(folder, &format!("{name}-images-idx3-ubyte"), 3)?;
    let (path, labels) = array(folder, &format!("{name}-labels-idx1-ubyte"), 1)?;
    let path = path.display();
    let count = images.shape[0];
    ensure!(
        labels.data.len() == count,
        "{path} has {} labels for {count} images",
        labels.data.len()
    );
    if let Some(index) = labels.data.iter().position(|&label| usize::from(label) >= CLASSES) {
        bail!(
            "{path}: label {} of image {index} is not in the interval [0, {}]",
            labels.data[index],
            CLASSES - 1
        );
    }
    Ok(Split {
        images: images.data,
        labels: labels.data,
        rows: images.shape[1],
        columns: images.shape[2],
    })
}

fn array(folder: &Path, name: &str, dimensions: usize) -> Result<(PathBuf, Idx)> {
    let candidates = [folder.join(name), folder.join(format!("{name}.gz"))];
    let path = candidates.into_iter().find(|path| path.exists()).with_context(|| {
        let how = "`scripts/setup --data` or `apt-get install dataset-fashion-mnist`";
        format!("no {name}[.gz] in {}; get Fashion-MNIST with {how}", folder.display())
    })?;
    let array = idx::read(&path, dimensions)?;
    Ok((path, array))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A folder with two training images of 2 x 3 and one test image, with these training labels.
    fn folder(labels: &[u8]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, shape: &[u8], data: &[u8]| {
            let shape = shape.iter().flat_map(|&length| [0, 0, 0, length]);
            let header: Vec<u8> =
                [0, 0, 8, shape.clone().count() as u8 / 4].into_iter().chain(shape).collect();
            fs::write(folder.path().join(name), [&header, data].concat()).unwrap();
        };
        write("train-images-idx3-ubyte", &[2, 2, 3], &[7; 12]);
        write("train-labels-idx1-ubyte", &[labels.len() as u8], labels);
        write("t10k-images-idx3-ubyte", &[1, 2, 3], &[5; 6]);
        write("t10k-labels-idx1-ubyte", &[1], &[9]);
        folder
    }

    fn error(folder: &Path) -> String {
        format!("{:#}", load(folder).err().expect("an error"))
    }

    #[test]
    fn reads_both_splits() {
        let (train, test) = load(folder(&[0, 9]).path()).unwrap();
        assert_eq!(
            (train.images, train.labels, train.rows, train.columns),
            (vec![7; 12], vec![0, 9], 2, 3)
        );
        assert_eq!((test.images, test.labels), (vec![5; 6], vec![9]));
    }

    #[test]
    fn an_empty_or_missing_folder_says_how_to_get_the_data() {
        let empty = tempfile::tempdir().unwrap();
        for folder in [empty.path().to_owned(), empty.path().join("missing")] {
            assert_eq!(
                error(&folder),
                format!(
                    "no train-images-idx3-ubyte[.gz] in {}; get Fashion-MNIST with `scripts/setup \
                     --data` or `apt-get install dataset-fashion-mnist`",
                    folder.display()
                )
            );
        }
    }

    #[test]
    fn labels_must_fit_the_images() {
        assert!(
            error(folder(&[1, 2, 3]).path())
                .ends_with("train-labels-idx1-ubyte has 3 labels for 2 images")
        );
        assert!(
            error(folder(&[1, 10]).path())
                .ends_with("label 10 of image 1 is not in the interval [0, 9]")
        );
    }
}
