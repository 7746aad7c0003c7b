//! Shared by the examples of views: options, first weights, and the loop over batches.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use clap::{Args, ValueEnum};
use flow::global::init::Init;
use flow::global::lr_scheduler::LrScheduler;
use flow::global::random::Generator;
use flow::global::view::{Array, Job, View, devices};
use flow::prelude::*;

use crate::fashion;
use crate::images::{Images, Pixels, SIDE};
use crate::options::{from_zero_up, write_losses};

/// The way in which a program sees batches.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum Seen {
    /// A list with an array for each rank
    Mirrored,
    /// One array: the logical batch
    Consistent,
}

impl From<Seen> for View {
    fn from(seen: Seen) -> Self {
        match seen {
            Seen::Mirrored => Self::Mirrored,
            Seen::Consistent => Self::Consistent,
        }
    }
}

/// The options of a training on Fashion-MNIST.
#[derive(Args)]
pub struct Options {
    /// Folder with the data set's four IDX files, gzipped or not [default: Debian's
    /// dataset-fashion-mnist]
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Ranks that train [default: all]
    #[arg(long, value_name = "N")]
    pub devices: Option<NonZeroUsize>,
    /// How often all images are seen
    #[arg(long, value_name = "N", default_value = "1")]
    pub epochs: NonZeroUsize,
    /// Images per step, of all ranks together
    #[arg(long, value_name = "N", default_value = "100")]
    pub batch_size: NonZeroUsize,
    /// Learning rate
    #[arg(long, value_name = "RATE", default_value = "0.1")]
    #[arg(value_parser = from_zero_up, allow_hyphen_values = true)]
    pub lr: f64,
    /// Seed of the first weights and of the images' order
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Stop after so many steps
    #[arg(long, value_name = "N")]
    pub steps: Option<usize>,
    /// cpu, or cuda: a GPU for each rank
    #[arg(long, default_value = "cpu")]
    pub device: DeviceKind,
    /// Compute in double precision, to compare trainings: what rounding makes of two then stays
    /// small
    #[arg(long)]
    pub double: bool,
    /// File for the loss of each step, the mean over all images, a line each
    #[arg(long, value_name = "FILE")]
    pub losses: Option<PathBuf>,
}

/// The ranks, the device and the images of a training.
pub struct Setting {
    /// The ranks that train.
    pub placement: Placement,
    /// The device of the variables.
    pub device: Device,
    /// The training images.
    pub train: Arc<Images>,
    /// The test images.
    pub test: Arc<Images>,
    /// All ranks.
    pub group: ProcessGroup,
}

impl Options {
    /// Joins the ranks and reads the images, before a model is made.
    ///
    /// # Errors
    /// Fewer devices than asked for, or no data.
    pub fn setting(&self) -> Result<Setting> {
        let group = ProcessGroup::from_env()?;
        let device = group.use_device(self.device)?;
        let count = self.devices.map_or(group.world_size(), NonZeroUsize::get);
        let placement = devices(&group, count)?;
        // What dropout drops: by logical element, and in the mirrored view by rank.
        global::manual_seed(&placement, self.seed)?;
        tch::manual_seed(self.seed as i64 + group.rank() as i64);
        let folder = self.data.clone().unwrap_or_else(fashion::default_folder);
        let (train, test) = Images::load(&folder, Pixels::Scaled)?;
        if group.rank() == 0 {
            write_losses(self.losses.as_deref(), &[])?;
        }
        Ok(Setting { placement, device, train, test, group })
    }

    /// Fills the variables as the documents do: `truncated_normal(0.1)`, biases with 0.
    ///
    /// # Errors
    /// Those of libtorch.
    pub fn first_weights(&self, vs: &mut nn::VarStore) -> Result<()> {
        if self.double {
            vs.double();
        }
        let mut generator = Generator::new(self.seed);
        let mut variables: Vec<(String, Tensor)> = vs.variables().into_iter().collect();
        variables.sort_by(|(one, _), (other, _)| one.cmp(other));
        for (name, mut variable) in variables {
            let init = if name.ends_with("bias") {
                Init::Constant(0.0)
            } else {
                Init::TruncatedNormal { mean: 0.0, deviation: 0.1 }
            };
            init.fill(&mut variable, &mut generator)?;
        }
        Ok(())
    }

    /// Declares images and, for a training, labels.
    pub fn declare<'a, M: FnMut(&[Tensor]) -> global::Result<Tensor>>(
        &self,
        job: Job<'a, M>,
        view: View,
        setting: &Setting,
        with_labels: bool,
    ) -> Job<'a, M> {
        // In the mirrored view the shape is that of the longest array of a rank.
        let parts = if view == View::Mirrored { setting.placement.ranks().len() } else { 1 };
        let rows = self.batch_size.get().div_ceil(parts) as i64;
        let kind = if self.double { Kind::Double } else { Kind::Float };
        let job = job.input("images", [rows, 1, SIDE as i64, SIDE as i64], kind);
        if with_labels { job.input("labels", [rows], Kind::Int64) } else { job }
    }

    /// Runs a training job on the training images, and prints every 20th loss as the documents do.
    ///
    /// # Errors
    /// Those of loading, or of the job.
    pub fn train<'a, M: FnMut(&[Tensor]) -> global::Result<Tensor>>(
        &self,
        job: Job<'a, M>,
        view: View,
        setting: &Setting,
    ) -> Result<()> {
        let rates = LrScheduler::PiecewiseConstant { boundaries: vec![], values: vec![self.lr] };
        let mut job = self.declare(job, view, setting, true).lr_scheduler(rates, 0);
        let first = setting.group.rank() == 0;
        // The order of one rank: every rank sees the same whole batches.
        let mut sampler =
            DistributedSampler::with_replicas(setting.train.len(), 1, 0)?.seed(self.seed);
        let mut losses: Vec<String> = Vec::new();
        for epoch in 1..=self.epochs.get() {
            sampler.set_epoch(epoch as u64);
            let left = self.steps.map_or(usize::MAX, |steps| steps - losses.len());
            let loader = DataLoader::new(&setting.train, &sampler, self.batch_size.get());
            for batch in loader.drop_last(true).into_iter().take(left) {
                let (images, labels) = batch?;
                let inputs = [self.kind(images), labels].map(|array| seen(view, setting, array));
                let loss = job.run(inputs)?.whole()?.mean(Kind::Double).double_value(&[]);
                if first && losses.len().is_multiple_of(20) {
                    println!("step {}: {loss}", losses.len());
                }
                losses.push(loss.to_string());
            }
        }
        if first {
            write_losses(self.losses.as_deref(), &losses)?;
        }
        Ok(())
    }

    /// Prints the part of the test images, in whole batches, that a job classifies rightly.
    ///
    /// # Errors
    /// Those of loading, or of the job.
    pub fn test<'a, M: FnMut(&[Tensor]) -> global::Result<Tensor>>(
        &self,
        job: Job<'a, M>,
        view: View,
        setting: &Setting,
    ) -> Result<()> {
        let mut job = self.declare(job, view, setting, false);
        let sampler = DistributedSampler::with_replicas(setting.test.len(), 1, 0)?.shuffle(false);
        let mut right = 0;
        let mut all = 0;
        let loader = DataLoader::new(&setting.test, &sampler, self.batch_size.get());
        for batch in loader.drop_last(true) {
            let (images, labels) = batch?;
            let classes =
                job.run([seen(view, setting, self.kind(images))])?.whole()?.argmax(1, false);
            right += classes.to(Device::Cpu).eq_tensor(&labels).sum(Kind::Int64).int64_value(&[]);
            all += labels.numel();
        }
        if setting.group.rank() == 0 && all > 0 {
            println!("test accuracy {:.2} %", 100.0 * right as f64 / all as f64);
        }
        Ok(())
    }

    fn kind(&self, images: Tensor) -> Tensor {
        if self.double { images.to_kind(Kind::Double) } else { images }
    }
}

/// Returns a batch as the view has it: whole, or a list with rows for each rank.
fn seen(view: View, setting: &Setting, batch: Tensor) -> Array {
    match view {
        View::Consistent => batch.into(),
        View::Mirrored => batch.tensor_split(setting.placement.ranks().len() as i64, 0).into(),
    }
}

/// Returns the cross entropy of each image.
pub fn losses(logits: &Tensor, labels: &Tensor) -> Tensor {
    logits.cross_entropy_loss(labels, None::<Tensor>, tch::Reduction::None, -100, 0.0)
}
