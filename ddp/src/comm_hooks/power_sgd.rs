//! Gradients as products of two thin matrices.

use std::collections::{HashMap, HashSet};

use flow_autograd::BoxError;
use flow_comm::{ReduceOp, digest};
use flow_tensor::TensorCollectives;
use rand_mt::Mt;
use tch::{TchError, Tensor};

use super::wide;
use crate::bucket::comm_hook::{CommHook, GradBucket};
use crate::bucket::pending::Pending;

/// PowerSGD: sends a low-rank approximation of each gradient (T. Vogels, S. P. Karimireddy, M. Jaggi,
/// "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019).
///
/// A gradient of `n` rows and `m` columns (the first dimension, and all others together) is sent as
/// two matrices of `n` and `m` rows and `r` columns. What the approximation leaves out is added to the
/// next step's gradient (error feedback). Vectors, and matrices that would not shrink enough, are
/// averaged as they are. So is everything in the first steps, in which gradients change fast.
///
/// Two operations a bucket wait for all ranks, at the end of backward: this pays where the network is
/// slow. Each rank makes its left matrix orthonormal on its own: let all have processors, or GPUs, of
/// one kind, so that all get the same numbers.
///
/// It is PyTorch's `powerSGD_hook`, and so are the names and defaults. With the same random matrices it
/// makes the same gradients, but for rounding. Errors and matrices are kept by parameter, and not by
/// bucket: they outlive the rebuilding of the buckets, and a start in the first step is sound.
/// [`PowerSgd::batched`] is its `batched_powerSGD_hook`.
///
/// ```no_run
/// # fn main() -> anyhow::Result<()> {
/// use flow_ddp::comm_hooks::PowerSgd;
/// use flow_ddp::{Ddp, ProcessGroup};
/// # let group = ProcessGroup::from_env()?;
/// let builder = Ddp::builder(&group).comm_hook(PowerSgd::new(2).start_iter(100));
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct PowerSgd {
    rank: i64,
    start_iter: u64,
    min_compression_rate: f64,
    error_feedback: bool,
    warm_start: bool,
    seed: u32,
    batched: bool,
    /// The steps so far.
    iteration: u64,
    /// By parameter, or by the first parameter of a bucket.
    memories: HashMap<String, Memory>,
    /// What is compressed in this step.
    seen: HashSet<String>,
}

/// What is kept of a gradient from one step to the next.
#[derive(Debug, Default)]
struct Memory {
    /// What the last approximation has left out.
    error: Option<Tensor>,
    /// The right matrix of the last approximation.
    right: Option<Tensor>,
}

/// A gradient on its way.
enum Part {
    /// It is averaged as it is.
    Whole(Tensor),
    LowRank {
        name: String,
        is_used: bool,
        /// The gradient, with the error of the last step if this rank uses the parameter, and then
        /// what the approximation leaves out of it: `n` times `m`.
        matrix: Tensor,
        /// `m` times `r`, orthonormal.
        right: Tensor,
    },
}

impl PowerSgd {
    /// Returns the hook that approximates gradients by matrices of this rank, 1 or more (PyTorch's
    /// `matrix_approximation_rank`): the larger, the more exact, and the more bytes.
    pub fn new(rank: u32) -> Self {
        Self {
            rank: i64::from(rank.max(1)),
            start_iter: 1000,
            min_compression_rate: 2.0,
            error_feedback: true,
            warm_start: true,
            seed: 0,
            batched: false,
            iteration: 0,
            memories: HashMap::new(),
            seen: HashSet::new(),
        }
    }

    /// Sets the number of steps that average gradients as they are (default: 1,000).
    pub fn start_iter(mut self, steps: u64) -> Self {
        self.start_iter = steps;
        self
    }

    /// Sets how many times fewer elements a gradient must have to be sent as matrices (default: 2).
    pub fn min_compression_rate(mut self, rate: f64) -> Self {
        self.min_compression_rate = rate;
        self
    }

    /// Sets whether the next gradient gets what an approximation leaves out (default: yes).
    pub fn error_feedback(mut self, feedback: bool) -> Self {
        self.error_feedback = feedback;
        self
    }

    /// Sets whether an approximation begins with the last one's matrix (default: yes), rather than
    /// with a random one.
    pub fn warm_start(mut self, warm: bool) -> Self {
        self.warm_start = warm;
        self
    }

    /// Sets the seed of the random matrices (default: 0), the same on all ranks.
    pub fn seed(mut self, seed: u32) -> Self {
        self.seed = seed;
        self
    }

    /// Sets whether a bucket's gradients are approximated together, as one square matrix with zeros at
    /// its end (default: no): fewer and smaller operations. Such a matrix has a larger rank than a
    /// gradient: with too small a `rank` the training diverges.
    pub fn batched(mut self, batched: bool) -> Self {
        self.batched = batched;
        self
    }

    /// Returns what is approximated of a bucket, or sent as it is.
    fn parts(&mut self, bucket: &GradBucket<'_>, iteration: u64) -> Result<Vec<Part>, BoxError> {
        let mut parameters = bucket.parameters();
        if self.batched {
            let name = parameters.next().map(|(name, _)| name).unwrap_or_default();
            let matrix = square(&bucket.buffer()?)?;
            let is_used = bucket.used().any(|is_used| is_used);
            return Ok(vec![self.part(name, &matrix, is_used, iteration)?]);
        }
        let mut parts = Vec::new();
        for (((name, _), gradient), is_used) in
            parameters.zip(&bucket.gradients()?).zip(bucket.used())
        {
            parts.push(self.part(name, gradient, is_used, iteration)?);
        }
        Ok(parts)
    }

    fn part(
        &mut self,
        name: &str,
        gradient: &Tensor,
        is_used: bool,
        iteration: u64,
    ) -> Result<Part, TchError> {
        let size = gradient.size();
        let rows = size.first().copied().unwrap_or(1);
        let columns = size.iter().skip(1).product::<i64>();
        let rank = self.rank.min(rows).min(columns);
        let sent = (rows + columns) * rank;
        let is_smaller = sent as f64 * self.min_compression_rate < (rows * columns) as f64;
        if size.len() < 2 || rank == 0 || !is_smaller {
            return Ok(Part::Whole(gradient.f_reshape([-1])?.copy()));
        }
        let memory = self.memories.entry(name.to_owned()).or_default();
        let mut matrix = gradient.f_reshape([rows, columns])?.f_to_kind(wide(gradient.kind()))?;
        self.seen.insert(name.to_owned());
        // An error that comes where no rank uses the parameter would be lost.
        if let Some(error) =
            memory.error.as_ref().filter(|error| is_used && error.size() == [rows, columns])
        {
            matrix = matrix.f_add(error)?;
        }
        let right = match memory.right.take().filter(|_| self.warm_start) {
            Some(right) if right.size() == [columns, rank] => right,
            _ => {
                let seed = digest(&format!("{} {iteration} {name}", self.seed)) as u32;
                random(columns, rank, seed)
                    .f_to_device(matrix.device())?
                    .f_to_kind(matrix.kind())?
            }
        };
        let right = orthonormal(&right)?;
        Ok(Part::LowRank { name: name.to_owned(), is_used, matrix, right })
    }

    /// Makes the gradient that all ranks get of a reduced part.
    fn reduced(
        &mut self,
        part: Part,
        left: Tensor,
        rights: &mut impl Iterator<Item = Tensor>,
    ) -> Result<Tensor, TchError> {
        let Part::LowRank { name, is_used, matrix, .. } = part else { return Ok(left) };
        let Some(right) = rights.next() else { return Ok(left) };
        let approximation = left.f_matmul(&right.f_tr()?)?;
        let memory = self.memories.entry(name).or_default();
        // A gradient that overflows, of which a GradScaler makes nothing, must not come again.
        if bool::try_from(right.f_isfinite()?.f_all()?)? {
            if self.error_feedback && is_used {
                memory.error = Some(matrix);
            }
            memory.right = Some(right);
        }
        approximation.f_view([-1])
    }
}

impl CommHook for PowerSgd {
    fn launch(&mut self, bucket: &mut GradBucket<'_>) -> Result<Pending, BoxError> {
        let iteration = self.iteration;
        if bucket.is_last() {
            self.iteration += 1;
        }
        if iteration < self.start_iter {
            return Ok(bucket.all_reduce()?);
        }
        let _guard = tch::no_grad_guard();
        let mut parts = self.parts(bucket, iteration)?;
        let mut lefts = Vec::with_capacity(parts.len());
        for part in &parts {
            lefts.push(match part {
                Part::Whole(gradient) => gradient.shallow_clone(),
                Part::LowRank { matrix, right, .. } => matrix.f_matmul(right)?,
            });
        }
        let group = bucket.group();
        group.all_reduce_coalesced(&mut lefts, ReduceOp::Avg)?;
        let mut rights = Vec::new();
        for (part, left) in parts.iter_mut().zip(&mut lefts) {
            if let Part::LowRank { matrix, .. } = part {
                *left = orthonormal(left)?;
                let right = matrix.f_tr()?.f_matmul(left)?;
                // What the approximation leaves out of this rank's own matrix. What it leaves out of
                // the mean is the mean of that, also where some ranks do not use the parameter.
                if self.error_feedback {
                    *matrix = matrix.f_sub(&left.f_matmul(&right.f_tr()?)?)?;
                }
                rights.push(right);
            }
        }
        if !rights.is_empty() {
            group.all_reduce_coalesced(&mut rights, ReduceOp::Avg)?;
        }
        let mut rights = rights.into_iter();
        let gradients = bucket.gradients()?;
        let kind = gradients[0].kind();
        let length: usize = gradients.iter().map(Tensor::numel).sum();
        let mut reduced = Vec::with_capacity(parts.len());
        for (part, left) in parts.into_iter().zip(lefts) {
            reduced.push(self.reduced(part, left, &mut rights)?.f_to_kind(kind)?);
        }
        if bucket.is_last() {
            let seen = std::mem::take(&mut self.seen);
            self.memories.retain(|name, _| seen.contains(name));
        }
        let reduced = Tensor::f_cat(&reduced, 0)?;
        Ok(Pending::ready(reduced.f_narrow(0, 0, length as i64)?))
    }

    fn waits_for_ranks(&self) -> bool {
        true
    }

    fn name(&self) -> String {
        let Self {
            rank,
            start_iter,
            min_compression_rate,
            error_feedback,
            warm_start,
            seed,
            batched,
            ..
        } = self;
        format!(
            "PowerSgd of rank {rank}, start_iter {start_iter}, min_compression_rate \
             {min_compression_rate}, error_feedback {error_feedback}, warm_start {warm_start}, seed \
             {seed}, batched {batched}"
        )
    }
}

/// Returns the elements of a vector as a square matrix, with zeros at its end.
fn square(vector: &Tensor) -> Result<Tensor, TchError> {
    let length = vector.numel();
    let mut side = length.isqrt();
    if side * side < length {
        side += 1;
    }
    let padding = side * side - length;
    vector.f_constant_pad_nd([0, padding as i64])?.f_view([side as i64, side as i64])
}

/// Returns a matrix whose columns have length 1 and are at right angles, and span what the given
/// ones do.
fn orthonormal(matrix: &Tensor) -> Result<Tensor, TchError> {
    let (columns, _) = Tensor::f_linalg_qr(matrix, "reduced")?;
    Ok(columns.contiguous())
}

/// Returns a matrix of numbers from -1 to 1, the same on all ranks.
fn random(rows: i64, columns: i64, seed: u32) -> Tensor {
    let mut generator = Mt::new(seed);
    let mut numbers = Vec::new();
    for _ in 0..rows * columns {
        numbers.push(f64::from(generator.next_u32()) / f64::from(u32::MAX) * 2.0 - 1.0);
    }
    Tensor::from_slice(&numbers).view([rows, columns])
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn columns_become_orthonormal() {
        let columns = orthonormal(&random(7, 3, 1)).unwrap();
        let products = columns.tr().matmul(&columns);
        let difference = products - Tensor::eye(3, (Kind::Double, Device::Cpu));
        assert!(difference.abs().max().double_value(&[]) < 1e-12);
    }
}
