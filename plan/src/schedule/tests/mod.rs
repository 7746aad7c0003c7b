//! What schedules are made of; what they cost is tested in the simulator's tests.

mod costs;

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
    assert_eq!(Schedule::gpipe(0, 1), Err(Error::Zero("rank")));
    assert_eq!(Schedule::one_f_one_b(1, 0), Err(Error::Zero("micro-batch")));
    assert_eq!(Schedule::gpipe(usize::MAX, 2), Err(Error::TooLarge(check::MAX)));
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
