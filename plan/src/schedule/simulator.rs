//! The simulator: when each rank computes what.

use std::collections::VecDeque;

use super::action::Action::{self, *};
use super::definition::Schedule;
use super::done::Done;
use super::error::{Result, ScheduleError};

/// Times of a stage's computations of one micro-batch, and of a send, in any unit. By default each
/// computation takes 1, and a send takes 0.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Costs {
    /// The forward.
    pub forward: f64,
    /// The gradients of the inputs.
    pub backward_input: f64,
    /// The gradients of the weights. A whole backward takes `backward_input + backward_weight`.
    pub backward_weight: f64,
    /// The time from a send until the receive is over. Neither rank is busy meanwhile, and sends do not
    /// slow each other down.
    pub send: f64,
}

impl Default for Costs {
    fn default() -> Self {
        Self { forward: 1.0, backward_input: 1.0, backward_weight: 1.0, send: 0.0 }
    }
}

impl Costs {
    fn check(&self) -> Result<()> {
        let Self { forward, backward_input, backward_weight, send } = *self;
        let mut costs = [forward, backward_input, backward_weight, send].into_iter();
        match costs.find(|cost| !(cost.is_finite() && *cost >= 0.0)) {
            Some(cost) => Err(ScheduleError::Cost(cost)),
            None => Ok(()),
        }
    }

    fn of(&self, action: Action) -> f64 {
        match action {
            Forward { .. } => self.forward,
            Backward { .. } => self.backward_input + self.backward_weight,
            BackwardInput { .. } => self.backward_input,
            BackwardWeight { .. } => self.backward_weight,
            _ => 0.0,
        }
    }
}

/// A computation with its begin and its end.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Interval {
    /// The computation.
    pub action: Action,
    /// The time at which it begins.
    pub start: f64,
    /// The time at which it is over.
    pub end: f64,
}

/// The computations of each rank in one step, which begins at time 0.
#[derive(Clone, PartialEq, Debug)]
pub struct Timeline {
    intervals: Vec<Vec<Interval>>,
    peak_activations: Vec<usize>,
}

impl Timeline {
    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.intervals.len()
    }

    /// Returns what a rank computes, in order: nothing if there is no such rank.
    pub fn intervals(&self, rank: usize) -> &[Interval] {
        self.intervals.get(rank).map_or(&[], Vec::as_slice)
    }

    /// Returns the time at which the last rank is ready.
    pub fn total(&self) -> f64 {
        let ends = self.intervals.iter().filter_map(|list| list.last());
        ends.fold(0.0, |total, last| last.end.max(total))
    }

    /// Returns the time of the step in which a rank does not compute.
    pub fn idle(&self, rank: usize) -> f64 {
        let busy = self.intervals(rank).iter().map(|interval| interval.end - interval.start);
        self.total() - busy.sum::<f64>()
    }

    /// Returns the bubble of a rank: its idle part of the step, from 0 to 1.
    pub fn bubble(&self, rank: usize) -> f64 {
        match self.total() {
            0.0 => 0.0,
            total => self.idle(rank) / total,
        }
    }

    /// Returns the most activations that a rank holds at once, or 0 if there is no such rank.
    ///
    /// There is one for each stage and micro-batch, from the forward to the end of the backward. In
    /// zero bubble schedules it lasts to the end of the gradients of weights. After the gradients
    /// of inputs, those of weights need a part of the activation only (M_W of M_B in Qi et al.
    /// 2023). So the number is an upper bound.
    pub fn peak_activations(&self, rank: usize) -> usize {
        self.peak_activations.get(rank).copied().unwrap_or(0)
    }
}

/// Simulates a schedule whose stages all take these times.
///
/// ```
/// use flow_plan::schedule::{simulate, Costs, Schedule};
///
/// let timeline = simulate(&Schedule::one_f_one_b(4, 8)?, &Costs::default())?;
/// assert_eq!(timeline.total(), 33.0);
/// assert_eq!(timeline.bubble(0), 3.0 / 11.0);
/// assert_eq!(timeline.peak_activations(0), 4);
/// # Ok::<(), flow_plan::schedule::ScheduleError>(())
/// ```
///
/// # Errors
/// Costs that are negative or not finite; ranks that wait for each other; a receive that does not come
/// in the order of the sends.
pub fn simulate(schedule: &Schedule, costs: &Costs) -> Result<Timeline> {
    simulate_stages(schedule, &vec![*costs; schedule.stages()])
}

/// Simulates a schedule with the times of each stage. `send` is the time of a send of that stage.
///
/// # Errors
/// Those of [`simulate`], and costs of more or fewer stages than the schedule has.
pub fn simulate_stages(schedule: &Schedule, costs: &[Costs]) -> Result<Timeline> {
    costs.iter().try_for_each(Costs::check)?;
    if costs.len() != schedule.stages() {
        return Err(ScheduleError::Stages { given: costs.len(), stages: schedule.stages() });
    }
    let ranks = carry_out(schedule, costs, true)?;
    let (intervals, peak_activations) =
        ranks.into_iter().map(|rank| (rank.intervals, rank.peak)).unzip();
    Ok(Timeline { intervals, peak_activations })
}

/// Returns an error if ranks wait for each other, or receive in another order than others send.
pub(super) fn check_order(schedule: &Schedule) -> Result<()> {
    carry_out(schedule, &vec![Costs::default(); schedule.stages()], false).map(drop)
}

/// Simulates a schedule. Intervals are recorded if `records` is set.
fn carry_out(schedule: &Schedule, costs: &[Costs], records: bool) -> Result<Vec<Rank>> {
    let mut simulation = Simulation {
        schedule,
        costs,
        records,
        done: Done::new(schedule.stages(), schedule.micro_batches()),
        ranks: (0..schedule.ranks()).map(|_| Rank::default()).collect(),
        channels: vec![Vec::new(); schedule.ranks()],
        awake: (0..schedule.ranks()).collect(),
    };
    while let Some(rank) = simulation.awake.pop() {
        simulation.run(rank)?;
    }
    simulation.check_finished()?;
    Ok(simulation.ranks)
}

/// Receives that are under way from one rank, with their times of arrival.
type Channel = VecDeque<(Action, f64)>;

/// Returns the channel from a rank among those to another. The list is short: a rank has few
/// neighbours.
fn channel(channels: &mut Vec<(usize, Channel)>, from: usize) -> &mut Channel {
    let at = channels.iter().position(|(rank, _)| *rank == from).unwrap_or(channels.len());
    if at == channels.len() {
        channels.push((from, Channel::new()));
    }
    &mut channels[at].1
}

/// The state of a rank.
#[derive(Default)]
struct Rank {
    /// The number of actions that are over.
    next: usize,
    /// The time at which the last of them was over.
    now: f64,
    intervals: Vec<Interval>,
    /// Activations that it holds.
    held: usize,
    /// The most activations that it has held.
    peak: usize,
}

struct Simulation<'a> {
    schedule: &'a Schedule,
    /// The costs of each stage.
    costs: &'a [Costs],
    /// The actions that are over, of all ranks: each stage is on one rank.
    done: Done,
    ranks: Vec<Rank>,
    records: bool,
    /// By the rank that receives, then by the rank that sends.
    channels: Vec<Vec<(usize, Channel)>>,
    /// Ranks that can perhaps go on, because something has been sent to them since they had to wait.
    awake: Vec<usize>,
}

impl Simulation<'_> {
    /// Runs a rank until it has to wait.
    fn run(&mut self, rank: usize) -> Result<()> {
        while let Some(&action) = self.schedule.actions(rank).get(self.ranks[rank].next) {
            if !self.act(rank, action)? {
                break;
            }
        }
        Ok(())
    }

    /// Does this action, and returns true, if the rank need not wait for it.
    fn act(&mut self, rank: usize, action: Action) -> Result<bool> {
        if self.lacks(action).is_some() {
            return Ok(false);
        }
        let state = &mut self.ranks[rank];
        if let Some(receive) = action.receive() {
            let to = self.schedule.rank_of(receive.stage());
            let arrival = state.now + self.costs[action.stage()].send;
            channel(&mut self.channels[to], rank).push_back((receive, arrival));
            self.awake.push(to);
        } else if let Some(send) = action.send() {
            let from = self.schedule.rank_of(send.stage());
            match channel(&mut self.channels[rank], from).pop_front() {
                None => return Ok(false),
                Some((sent, _)) if sent != action => {
                    return Err(ScheduleError::Order { rank, from, action, sent });
                }
                Some((_, arrival)) => state.now = state.now.max(arrival),
            }
        } else {
            let start = state.now;
            state.now += self.costs[action.stage()].of(action);
            if self.records {
                state.intervals.push(Interval { action, start, end: state.now });
            }
            match action {
                Forward { .. } => state.held += 1,
                Backward { .. } | BackwardWeight { .. } => state.held -= 1,
                _ => {}
            }
            state.peak = state.peak.max(state.held);
        }
        state.next += 1;
        self.done.insert(action);
        Ok(true)
    }

    /// Returns an action that must be over on this rank before `action`, and is not.
    fn lacks(&self, action: Action) -> Option<Action> {
        let mut needs = needs(self.schedule, action).into_iter().flatten();
        needs.find(|need| !self.done.contains(*need))
    }

    /// Returns an error if ranks still wait for each other, or for themselves.
    fn check_finished(&self) -> Result<()> {
        let waits = self.ranks.iter().enumerate().filter_map(|(rank, state)| {
            let &action = self.schedule.actions(rank).get(state.next)?;
            Some(match self.lacks(action) {
                Some(need) => format!("rank {rank}: {need} must come before {action}"),
                None => format!("rank {rank} waits for the {action}"),
            })
        });
        match waits.collect::<Vec<_>>() {
            waits if waits.is_empty() => Ok(()),
            waits => Err(ScheduleError::Deadlock(waits.join("; "))),
        }
    }
}

/// Returns the actions that must be over on the same rank before this action.
fn needs(schedule: &Schedule, action: Action) -> [Option<Action>; 2] {
    match action {
        Forward { stage: 0, .. } | RecvActivation { .. } | RecvGradient { .. } => [None, None],
        Forward { stage, micro_batch } => {
            let before = stage - 1;
            if schedule.rank_of(before) == schedule.rank_of(stage) {
                [Some(Forward { stage: before, micro_batch }), None]
            } else {
                [Some(RecvActivation { stage, micro_batch }), None]
            }
        }
        Backward { stage, micro_batch } | BackwardInput { stage, micro_batch } => {
            let forward = Some(Forward { stage, micro_batch });
            let next = stage + 1;
            if next == schedule.stages() {
                [forward, None]
            } else if schedule.rank_of(next) == schedule.rank_of(stage) {
                [forward, Some(BackwardInput { stage: next, micro_batch })]
            } else {
                [forward, Some(RecvGradient { stage, micro_batch })]
            }
        }
        SendActivation { stage, micro_batch } => [Some(Forward { stage, micro_batch }), None],
        BackwardWeight { stage, micro_batch } | SendGradient { stage, micro_batch } => {
            [Some(BackwardInput { stage, micro_batch }), None]
        }
    }
}
