//! Sends and receives, added to what ranks compute.

use std::collections::HashMap;

use super::action::Action::{self, *};

/// The receive of what `action` needs of another stage, and that stage.
fn needed(action: Action, stages: usize) -> Option<(Action, usize)> {
    match action {
        Forward { stage, micro_batch } if stage > 0 => {
            Some((RecvActivation { stage, micro_batch }, stage - 1))
        }
        Backward { stage, micro_batch } | BackwardInput { stage, micro_batch }
            if stage + 1 < stages =>
        {
            Some((RecvGradient { stage, micro_batch }, stage + 1))
        }
        _ => None,
    }
}

/// The send of what `action` computes for another stage, and the receive there.
fn produced(action: Action, stages: usize) -> Option<(Action, Action)> {
    match action {
        Forward { stage, micro_batch } if stage + 1 < stages => Some((
            SendActivation { stage, micro_batch },
            RecvActivation { stage: stage + 1, micro_batch },
        )),
        Backward { stage, micro_batch } | BackwardInput { stage, micro_batch } if stage > 0 => {
            Some((
                SendGradient { stage, micro_batch },
                RecvGradient { stage: stage - 1, micro_batch },
            ))
        }
        _ => None,
    }
}

/// What each rank does, of what each rank computes. What a computation gives another rank is sent
/// right after it. What a computation needs of another rank is received right before it, and with
/// it all that this rank has sent before: so receives come in the order of their sends, and none
/// waits for more than the computation does.
pub(super) fn with_communication(
    rank_of_stage: &[usize],
    computations: Vec<Vec<Action>>,
) -> Vec<Vec<Action>> {
    let stages = rank_of_stage.len();
    // From one rank to another: the receives, in the order of their sends.
    let mut channels: HashMap<(usize, usize), Vec<Action>> = HashMap::new();
    // Of each receive: its place in its channel.
    let mut places: HashMap<Action, usize> = HashMap::new();
    for (rank, list) in computations.iter().enumerate() {
        for (_, receive) in list.iter().filter_map(|&action| produced(action, stages)) {
            let to = rank_of_stage[receive.stage()];
            if to != rank {
                let channel = channels.entry((rank, to)).or_default();
                places.insert(receive, channel.len());
                channel.push(receive);
            }
        }
    }
    let with_communication = |(rank, list): (usize, Vec<Action>)| {
        // How much of each channel to this rank has been received.
        let mut received: HashMap<usize, usize> = HashMap::new();
        let mut actions = Vec::with_capacity(3 * list.len());
        for action in list {
            if let Some((receive, stage)) = needed(action, stages) {
                let from = rank_of_stage[stage];
                if let (Some(channel), Some(&place)) =
                    (channels.get(&(from, rank)), places.get(&receive))
                {
                    let received = received.entry(from).or_default();
                    if *received <= place {
                        actions.extend(&channel[*received..=place]);
                        *received = place + 1;
                    }
                }
            }
            actions.push(action);
            if let Some((send, receive)) = produced(action, stages) {
                if rank_of_stage[receive.stage()] != rank {
                    actions.push(send);
                }
            }
        }
        actions
    };
    computations.into_iter().enumerate().map(with_communication).collect()
}
