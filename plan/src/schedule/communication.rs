//! Sends and receives, added to what ranks compute.

use std::collections::HashMap;

use super::action::Action::{self, *};

/// The receive of what `action` needs of another stage.
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

/// The send of what `action` computes for another stage, and the receive there.
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

/// What each rank does, of what each rank computes. What a computation gives another rank is sent
/// right after it. What a computation needs of another rank is received right before it, and with
/// it all that this rank has sent before: so receives come in the order of their sends, and none
/// waits for more than the computation does.
pub(super) fn with_communication(
    rank_of_stage: &[usize],
    micro_batches: usize,
    computations: Vec<Vec<Action>>,
) -> Vec<Vec<Action>> {
    let stages = rank_of_stage.len();
    // From one rank to another: the receives, in the order of their sends.
    let mut channels: HashMap<(usize, usize), Vec<Action>> = HashMap::new();
    // Of each receive of activations, and of gradients: the rank that sends, and the place in the
    // channel.
    let mut places = [(); 2].map(|()| vec![None; stages * micro_batches]);
    let table_of = |receive: Action| usize::from(matches!(receive, RecvGradient { .. }));
    let at = |receive: Action| receive.stage() * micro_batches + receive.micro_batch();
    let mut add_sends = |(rank, list): (usize, Vec<Action>)| {
        let mut actions = Vec::with_capacity(2 * list.len());
        for action in list {
            actions.push(action);
            if let Some((send, receive)) = exchange_after(action, stages) {
                let to = rank_of_stage[receive.stage()];
                if to != rank {
                    let channel = channels.entry((rank, to)).or_default();
                    places[table_of(receive)][at(receive)] = Some((rank, channel.len()));
                    channel.push(receive);
                    actions.push(send);
                }
            }
        }
        actions
    };
    let with_sends: Vec<_> = computations.into_iter().enumerate().map(&mut add_sends).collect();
    let add_receives = |(rank, list): (usize, Vec<Action>)| {
        let mut actions = Vec::with_capacity(2 * list.len());
        // By the rank that sends: how much of its channel has been received.
        let mut received: HashMap<usize, usize> = HashMap::new();
        for action in list {
            let receive = receive_before(action, stages);
            let place = receive.and_then(|receive| places[table_of(receive)][at(receive)]);
            if let Some((from, place)) = place {
                let channel = channels.get(&(from, rank)).map_or(&[][..], Vec::as_slice);
                let received = received.entry(from).or_default();
                actions.extend(channel.iter().take(place + 1).skip(*received));
                *received = (place + 1).max(*received);
            }
            actions.push(action);
        }
        actions
    };
    with_sends.into_iter().enumerate().map(add_receives).collect()
}
