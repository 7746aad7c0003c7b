//! Constructors of schedules.

use super::action::Action;
use super::check::{check, check_counts};
use super::communication::with_communication;
use super::definition::Schedule;
use super::error::{Result, ScheduleError};
use super::kind::ScheduleKind;
use super::one_f_one_b;
use super::simulator::check_order;
use super::zero_bubble;

impl Schedule {
    /// GPipe (Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    /// Parallelism"): all forwards, then all backwards. Stage s is on rank s. With p ranks and m
    /// micro-batches a part (p - 1) / (m + p - 1) of the time is idle. Each rank holds m
    /// activations.
    ///
    /// Backwards come in the order of the forwards, as in torch's `ScheduleGPipe`. So a stage adds
    /// up its gradients in the same order as with [`Schedule::one_f_one_b`].
    ///
    /// # Errors
    /// A count of 0, or more than 2^24 computations.
    pub fn gpipe(ranks: usize, micro_batches: usize) -> Result<Self> {
        Self::looped(ranks, 1, micro_batches, |rank| one_f_one_b::gpipe(rank, micro_batches))
    }

    /// 1F1B (PipeDream-Flush; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training
    /// on GPU Clusters Using Megatron-LM", section 2.2.1). A rank begins with backwards as soon as
    /// it can, then does a forward and a backward in turns. Stage s is on rank s. The idle time is
    /// that of [`Schedule::gpipe`], but rank r of p holds min(p - r, m) activations only.
    ///
    /// # Errors
    /// A count of 0, or more than 2^24 computations.
    pub fn one_f_one_b(ranks: usize, micro_batches: usize) -> Result<Self> {
        Self::interleaved(ranks, 1, micro_batches)
    }

    /// Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2): each rank has `chunks` stages, and
    /// stage s is on rank s mod p. The idle time is that of 1F1B divided by `chunks`. In exchange there
    /// is `chunks` times the communication, and there are more activations.
    ///
    /// Ranks take micro-batches in groups: a group passes one of the rank's stages, then the next.
    /// The paper's groups have p micro-batches, so that m must be a multiple of p. Here m may be
    /// any number: there are max(1, m / p) groups, as equal as can be, the larger first. With m < p
    /// ranks also wait for each other between chunks.
    ///
    /// With v chunks and g micro-batches in the first group, rank r holds at most
    /// min((v - 1) g + 2 (p - 1 - r) + 1, v m) activations of a stage. With g = p, rank 0 so has
    /// 1 + (p - 1) / (p v) times what it has in 1F1B (Korthikanti et al. 2022, "Reducing Activation
    /// Recomputation in Large Transformer Models", on pipeline parallelism).
    ///
    /// With one chunk this is [`Schedule::one_f_one_b`].
    ///
    /// # Errors
    /// A count of 0, or more than 2^24 computations.
    pub fn interleaved(ranks: usize, chunks: usize, micro_batches: usize) -> Result<Self> {
        Self::looped(ranks, chunks, micro_batches, |rank| {
            one_f_one_b::interleaved(rank, ranks, chunks, micro_batches)
        })
    }

    /// ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.1): 1F1B with the
    /// backward in halves. The rank before needs the gradients of the inputs only, so those of the
    /// weights wait. They fill the time that would be idle at the end. Stage s is on rank s.
    ///
    /// Let F, B and W be the times of a forward, and of the gradients of inputs and of weights. If
    /// W is no more than F and B, and m >= p, a rank is idle for (p - 1) (F + B - W). In 1F1B it is
    /// idle for (p - 1) (F + B + W). Each rank holds min(p, m) activations, as rank 0 in 1F1B.
    ///
    /// # Errors
    /// A count of 0, or more than 2^24 computations.
    pub fn zb_h1(ranks: usize, micro_batches: usize) -> Result<Self> {
        Self::looped(ranks, 1, micro_batches, |rank| zero_bubble::zb_h1(rank, ranks, micro_batches))
    }

    /// ZB-V (Qi et al. 2023, section 6). Each rank has two stages, s and 2 p - 1 - s. So the model
    /// goes down the ranks and up again in the form of a V. The first and the last stage are both
    /// on rank 0.
    ///
    /// Let F, B and W be the times of a stage's forward, and of its gradients of inputs and of
    /// weights. If W <= F <= B, and m >= 2 p - 1, the step takes (p - 1) max(B, 2 (B - W)) longer
    /// than the work of a rank. This is the later of two ends (the simulator finds none that is later):
    /// - The last rank is the tip of the V. It cannot begin with gradients before the first
    ///   micro-batch has passed all 2 p stages, and its gradient p - 1 of them. This is at
    ///   2 p F + (p - 1) B, when the last rank has computed 2 p forwards. From then on it is not idle,
    ///   so that it ends (p - 1) B after its work.
    /// - The last gradient of inputs then passes the other p - 1 ranks. Meanwhile the last rank does
    ///   2 (p - 1) gradients of weights that it has put off.
    ///
    /// If all three times are the same, no rank is idle from its first computation to its last.
    ///
    /// Each rank holds at most 2 p activations of a stage: as much as rank 0 in 1F1B, whose stages
    /// are twice as large.
    ///
    /// # Errors
    /// A count of 0, or more than 2^24 computations.
    pub fn zb_v(ranks: usize, micro_batches: usize) -> Result<Self> {
        check_counts(ranks, 2, micro_batches)?;
        let rank_of_stage = (0..ranks).chain((0..ranks).rev()).collect();
        let computations = (0..ranks).map(|rank| zero_bubble::zb_v(rank, ranks, micro_batches));
        Self::custom(rank_of_stage, computations.collect())
    }

    /// Makes the schedule of this name, one of [`ScheduleKind::ALL`]. Only `interleaved` reads
    /// `chunks`.
    ///
    /// # Errors
    /// There is no such name, or the schedule's own method fails.
    pub fn named(name: &str, ranks: usize, chunks: usize, micro_batches: usize) -> Result<Self> {
        let Some(kind) = ScheduleKind::named(name) else {
            let names = ScheduleKind::ALL.map(ScheduleKind::name).join(", ");
            return Err(ScheduleError::UnknownName { name: name.to_owned(), names });
        };
        match kind {
            ScheduleKind::Gpipe => Self::gpipe(ranks, micro_batches),
            ScheduleKind::OneFOneB => Self::one_f_one_b(ranks, micro_batches),
            ScheduleKind::Interleaved => Self::interleaved(ranks, chunks, micro_batches),
            ScheduleKind::ZbH1 => Self::zb_h1(ranks, micro_batches),
            ScheduleKind::ZbV => Self::zb_v(ranks, micro_batches),
        }
    }

    /// Makes a schedule of your own from the rank of each stage, and what each rank computes, in
    /// order. Sends and receives are added.
    ///
    /// ```
    /// use flow_plan::schedule::{Action::*, Schedule};
    ///
    /// let forward = |stage| Forward { stage, micro_batch: 0 };
    /// let backward = |stage| Backward { stage, micro_batch: 0 };
    /// let computations = vec![vec![forward(0), backward(0)], vec![forward(1), backward(1)]];
    /// let schedule = Schedule::custom(vec![0, 1], computations)?;
    /// assert_eq!(schedule, Schedule::gpipe(2, 1)?);
    /// # Ok::<(), flow_plan::schedule::ScheduleError>(())
    /// ```
    ///
    /// # Errors
    /// Each micro-batch must pass each stage once forward and once backward (at once or in halves)
    /// on the rank of the stage. No ranks may wait for each other.
    pub fn custom(rank_of_stage: Vec<usize>, computations: Vec<Vec<Action>>) -> Result<Self> {
        let micro_batches = check(&rank_of_stage, &computations)?;
        let actions = with_communication(&rank_of_stage, micro_batches, computations);
        let schedule = Self { rank_of_stage, micro_batches, actions };
        check_order(&schedule)?;
        Ok(schedule)
    }

    /// Makes a schedule with stage s on rank s mod p, of each rank's computations.
    fn looped(
        ranks: usize,
        chunks: usize,
        micro_batches: usize,
        computations_of: impl Fn(usize) -> Vec<Action>,
    ) -> Result<Self> {
        check_counts(ranks, chunks, micro_batches)?;
        let rank_of_stage = (0..ranks * chunks).map(|stage| stage % ranks).collect();
        Self::custom(rank_of_stage, (0..ranks).map(computations_of).collect())
    }
}
