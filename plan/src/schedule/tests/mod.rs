//! What schedules are made of; what they cost is tested in the simulator's tests.

mod costs;

use proptest::prelude::*;
use proptest::sample::select;

use super::Action::*;
use super::*;

#[test]
fn the_last_rank_of_1f1b_takes_turns_from_the_start() {
    let schedule = Schedule::one_f_one_b(2, 2).unwrap();
    let (first, last) = (0, 1);
    assert_eq!(
        schedule.actions(first),
        [
            Forward { stage: 0, micro_batch: 0 },
            SendActivation { stage: 0, micro_batch: 0 },
            Forward { stage: 0, micro_batch: 1 },
            SendActivation { stage: 0, micro_batch: 1 },
            RecvGradient { stage: 0, micro_batch: 0 },
            Backward { stage: 0, micro_batch: 0 },
            RecvGradient { stage: 0, micro_batch: 1 },
            Backward { stage: 0, micro_batch: 1 },
        ]
    );
    assert_eq!(
        schedule.actions(last),
        [
            RecvActivation { stage: 1, micro_batch: 0 },
            Forward { stage: 1, micro_batch: 0 },
            Backward { stage: 1, micro_batch: 0 },
            SendGradient { stage: 1, micro_batch: 0 },
            RecvActivation { stage: 1, micro_batch: 1 },
            Forward { stage: 1, micro_batch: 1 },
            Backward { stage: 1, micro_batch: 1 },
            SendGradient { stage: 1, micro_batch: 1 },
        ]
    );
}

#[test]
fn neighbouring_stages_on_one_rank_need_no_sends() {
    let rank = |stages: [usize; 2]| {
        let forwards = stages.map(|stage| Forward { stage, micro_batch: 0 });
        let [first, second] = stages.map(|stage| Backward { stage, micro_batch: 0 });
        [forwards, [second, first]].concat()
    };
    let schedule = Schedule::custom(vec![0, 0], vec![rank([0, 1])]).unwrap();
    assert_eq!(schedule.actions(0), rank([0, 1]));
    assert_eq!(schedule.stages_of(0), [0, 1]);
}

#[test]
fn what_is_sent_first_is_received_first() {
    // Rank 0 sends micro-batch 0 before micro-batch 1; rank 1 takes them the other way round.
    let of = |micro_batch| move |stage| Forward { stage, micro_batch };
    let backward = |stage, micro_batch| Backward { stage, micro_batch };
    let first = vec![of(0)(0), of(1)(0), backward(0, 0), backward(0, 1)];
    let second = vec![of(1)(1), of(0)(1), backward(1, 0), backward(1, 1)];
    let schedule = Schedule::custom(vec![0, 1], vec![first, second]).unwrap();
    let receives = |stage| [0, 1].map(|micro_batch| RecvActivation { stage, micro_batch });
    assert_eq!(schedule.actions(1)[..4], [&receives(1)[..], &[of(1)(1), of(0)(1)]].concat());
}

#[test]
fn what_is_no_schedule_is_an_error_that_says_why() {
    let forward = |stage, micro_batch| Forward { stage, micro_batch };
    let backward = |stage, micro_batch| Backward { stage, micro_batch };
    let error = |ranks: &[usize], computations: &[&[Action]]| {
        let computations = computations.iter().map(|list| list.to_vec()).collect();
        Schedule::custom(ranks.to_vec(), computations).unwrap_err().to_string()
    };
    assert_eq!(Schedule::gpipe(0, 1), Err(ScheduleError::Zero("rank")));
    assert_eq!(Schedule::one_f_one_b(1, 0), Err(ScheduleError::Zero("micro-batch")));
    assert_eq!(Schedule::gpipe(usize::MAX, 2), Err(ScheduleError::TooLarge(check::MAX)));
    assert_eq!(Schedule::interleaved(2, 0, 2), Err(ScheduleError::Zero("chunk")));
    assert_eq!(Schedule::zb_v(1, usize::MAX), Err(ScheduleError::TooLarge(check::MAX)));
    assert_eq!(Schedule::zb_h1(1 << 20, 6), Err(ScheduleError::TooLarge(check::MAX)));
    assert_eq!(
        Schedule::named("zbv", 1, 1, 1).unwrap_err().to_string(),
        "no schedule has the name \"zbv\"; the names are gpipe, 1f1b, interleaved, zb-h1, zb-v"
    );
    assert_eq!(error(&[], &[&[]]), "a schedule needs at least one stage");
    assert_eq!(error(&[0], &[]), "a schedule needs at least one rank");
    assert_eq!(error(&[0], &[&[]]), "a schedule needs at least one micro-batch");
    assert_eq!(
        error(&[0, 7], &[&[]]),
        "stage 1 is on rank 7, but the computations are those of 1 ranks"
    );
    assert_eq!(
        error(&[0], &[&[SendGradient { stage: 0, micro_batch: 0 }]]),
        "rank 0: give no send of the input's gradient of stage 0, micro-batch 0: sends and receives \
         are added to the computations"
    );
    assert_eq!(
        error(&[0], &[&[forward(1, 0)]]),
        "rank 0: forward of stage 1, micro-batch 0: there are 1 stages, from 0 to 0"
    );
    assert_eq!(
        error(&[0, 1], &[&[forward(1, 0)], &[]]),
        "rank 0: forward of stage 1, micro-batch 0: rank 1 has this stage; give the computation to \
         rank 1"
    );
    let half = BackwardWeight { stage: 0, micro_batch: 0 };
    assert_eq!(
        error(&[0], &[&[forward(0, 0), backward(0, 0), half]]),
        "rank 0: backward of weights of stage 0, micro-batch 0 comes twice; each micro-batch passes \
         each stage once each way"
    );
    assert_eq!(
        error(&[0], &[&[forward(0, usize::MAX), forward(0, 0), half]]),
        "rank 0: backward of inputs of stage 0, micro-batch 0 is missing; each micro-batch passes \
         each stage once each way"
    );
}

proptest! {
    #[test]
    fn each_micro_batch_passes_each_stage_once_each_way(
        name in select(ScheduleKind::ALL.map(ScheduleKind::name).to_vec()), p in 1..9usize, v in 1..5usize, m in 1..30usize,
    ) {
        let schedule = Schedule::named(name, p, v, m).unwrap();
        let stages = match name {
            "interleaved" => v * p,
            "zb-v" => 2 * p,
            _ => p,
        };
        prop_assert_eq!((schedule.ranks(), schedule.stages()), (p, stages));
        prop_assert_eq!(schedule.micro_batches(), m);
        for rank in 0..p {
            prop_assert_eq!(schedule.stages_of(rank).len(), stages / p);
        }
        for stage in 0..stages {
            let rank = schedule.rank_of(stage);
            prop_assert!(schedule.stages_of(rank).contains(&stage));
            for micro_batch in 0..m {
                let times = |action| count(schedule.actions(rank), action);
                prop_assert_eq!(times(Forward { stage, micro_batch }), 1);
                let whole = times(Backward { stage, micro_batch });
                for half in [
                    BackwardInput { stage, micro_batch }, BackwardWeight { stage, micro_batch },
                ] {
                    prop_assert_eq!(whole + times(half), 1);
                }
            }
        }
    }

    #[test]
    fn receives_come_in_the_order_of_their_sends(
        name in select(ScheduleKind::ALL.map(ScheduleKind::name).to_vec()), p in 1..9usize, v in 1..5usize, m in 1..30usize,
    ) {
        let schedule = Schedule::named(name, p, v, m).unwrap();
        let mut messages = 0;
        for (from, to) in (0..p).flat_map(|from| (0..p).map(move |to| (from, to))) {
            let is_to = |receive: &Action| schedule.rank_of(receive.stage()) == to;
            let sent: Vec<_> = schedule.actions(from).iter()
                .filter_map(|action| action.receive()).filter(is_to).collect();
            let is_from = |receive: &Action| {
                receive.send().is_some_and(|send| schedule.rank_of(send.stage()) == from)
            };
            let received: Vec<_> =
                schedule.actions(to).iter().copied().filter(is_from).collect();
            prop_assert_eq!(&sent, &received);
            prop_assert!(from != to || sent.is_empty());
            messages += sent.len();
        }
        // Where two stages meet on one rank, nothing is sent.
        let is_cut = |&stage: &usize| schedule.rank_of(stage) != schedule.rank_of(stage - 1);
        prop_assert_eq!(messages, 2 * m * (1..schedule.stages()).filter(is_cut).count());
    }
}

fn count(actions: &[Action], action: Action) -> usize {
    actions.iter().filter(|&&other| other == action).count()
}
