//! Adds sends and receives to the computations of ranks.

use std::collections::HashMap;

use super::action::Action::{self, *};

/// Returns the receive of what `action` needs of another stage.
fn receive_before(action: Action, stages: usize) -> Option<Action> {
    match action {
        Forward { stage, micro_batch } if stage > 0 => Some(RecvActivation { stage, micro_batch }),
        Backward { stage, micro_batch } | BackwardInput { stage, micro_batch }
            if stage + 1 < stages =>
        {
            Some(RecvGradient { stage, micro_batch })
        }
        _ => None,
    }
}

/// Returns the send of what `action` computes for another stage, and the receive there.
fn exchange_after(action: Action, stages: usize) -> Option<(Action, Action)> {
    let send = match action {
        Forward { stage, micro_batch } if stage + 1 < stages => {
            SendActivation { stage, micro_batch }
        }
        Backward { stage, micro_batch } | BackwardInput { stage, micro_batch } if stage > 0 => {
            SendGradient { stage, micro_batch }
        }
        _ => return None,
    };
    Some((send, send.receive()?))
}

/// Adds sends and receives to what each rank computes. A rank sends the result of a computation right
/// after it. It receives what a computation needs right before it, after all that the sender has sent
/// before. So receives come in the order of their sends, and none waits for more than the computation
/// does.
pub(super) fn with_communication(
    rank_of_stage: &[usize],
    micro_batches: usize,
    computations: Vec<Vec<Action>>,
) -> Vec<Vec<Action>> {
    let stages = rank_of_stage.len();
    let mut channels = Channels::new(stages, micro_batches);
    let mut with_sends = Vec::with_capacity(computations.len());
    for (rank, list) in computations.into_iter().enumerate() {
        let mut actions = Vec::with_capacity(2 * list.len());
        for action in list {
            actions.push(action);
            if let Some((send, receive)) = exchange_after(action, stages) {
                let to = rank_of_stage[receive.stage()];
                if to != rank {
                    channels.push(rank, to, receive);
                    actions.push(send);
                }
            }
        }
        with_sends.push(actions);
    }
    let mut complete = Vec::with_capacity(with_sends.len());
    for (rank, list) in with_sends.into_iter().enumerate() {
        let mut actions = Vec::with_capacity(2 * list.len());
        // By the rank that sends: how much of its channel has been received.
        let mut received: HashMap<usize, usize> = HashMap::new();
        for action in list {
            let receive = receive_before(action, stages);
            if let Some((from, place)) = receive.and_then(|receive| channels.place(receive)) {
                let received = received.entry(from).or_default();
                if *received <= place {
                    actions.extend(&channels.between(from, rank)[*received..=place]);
                    *received = place + 1;
                }
            }
            actions.push(action);
        }
        complete.push(actions);
    }
    complete
}

/// The rank that sends, and a place in its channel.
type Place = (usize, usize);

/// The receives of all ranks.
struct Channels {
    micro_batches: usize,
    /// The receives by the ranks that send and receive, in the order of their sends.
    receives: HashMap<(usize, usize), Vec<Action>>,
    /// The place of each receive of an activation, by stage and micro-batch.
    activations: Vec<Option<Place>>,
    /// The place of each receive of a gradient, by stage and micro-batch.
    gradients: Vec<Option<Place>>,
}

impl Channels {
    fn new(stages: usize, micro_batches: usize) -> Self {
        Self {
            micro_batches,
            receives: HashMap::new(),
            activations: vec![None; stages * micro_batches],
            gradients: vec![None; stages * micro_batches],
        }
    }

    fn push(&mut self, from: usize, to: usize, receive: Action) {
        let channel = self.receives.entry((from, to)).or_default();
        let place = (from, channel.len());
        channel.push(receive);
        let index = receive.stage() * self.micro_batches + receive.micro_batch();
        if matches!(receive, RecvGradient { .. }) {
            self.gradients[index] = Some(place);
        } else {
            self.activations[index] = Some(place);
        }
    }

    fn place(&self, receive: Action) -> Option<Place> {
        let index = receive.stage() * self.micro_batches + receive.micro_batch();
        let places = match receive {
            RecvGradient { .. } => &self.gradients,
            _ => &self.activations,
        };
        places[index]
    }

    fn between(&self, from: usize, to: usize) -> &[Action] {
        self.receives.get(&(from, to)).map_or(&[], Vec::as_slice)
    }
}
