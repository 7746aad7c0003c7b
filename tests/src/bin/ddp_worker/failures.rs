//! Trainings in which something goes wrong in step 5, on rank 1 unless said otherwise.

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use flow_autograd::GradHook;
use flow_ddp::{CommError, Ddp, Error, ProcessGroup, TensorCollectives, TryBackwardStep};
use flow_tests::registry::{Job, Scenario, Test, by_hand, launched, scenario, signal};
use flow_tests::{DETECTION_LIMIT, Finished, assert_contains};
use rustix::process::{Signal, getpid, kill_process};
use tch::nn::{self, ModuleT, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

/// In place, by copies, and by a thread for communication.
const fn modes(job: Job) -> [Job; 3] {
    [
        job,
        job.mode("copies", "FLOW_DDP_COPY", "1"),
        job.mode("thread", "FLOW_DDP_PROGRESS", "thread"),
    ]
}

/// Under flow-launch, which stops the others.
const LAUNCHED: &[Job] = &modes(launched(3));
const TWO: &[Job] = &modes(by_hand(&[2]));
const THREE: &[Job] = &modes(by_hand(&[3]));
const HANGS: &[Job] = &modes(launched(3).flags(&["--grace", "1"]));

pub const SCENARIOS: &[Scenario] = &[
    scenario("an_exit_is_reported", |group| train(group, Event::Exit), LAUNCHED)
        .checked_by(|test| ends_with(test, 3, "failed with exit code 3")),
    scenario("a_kill_is_reported", |group| train(group, Event::Kill), &[launched(2)])
        .checked_by(|test| ends_with(test, 128 + 9, "was killed by signal 9 (SIGKILL)")),
    scenario("a_panic_is_reported", |group| train(group, Event::Panic), &[launched(2)])
        .checked_by(reports_a_panic),
    scenario("a_rank_that_hangs_is_named", |group| train(group, Event::Hang), HANGS)
        .checked_by(names_who_hangs),
    scenario("survivors_name_a_killed_rank", |group| train(group, Event::Kill), THREE)
        .checked_by(names_who_is_gone),
    scenario("survivors_name_a_rank_that_exits", |group| train(group, Event::Exit), THREE)
        .checked_by(names_who_is_gone),
    scenario("a_panic_in_a_hook_fails_all", |group| train(group, Event::HookPanic), THREE)
        .checked_by(|test| fails_on_all(test, "a gradient hook panicked: the hook cannot go on")),
    scenario("an_error_in_a_hook_fails_all", |group| train(group, Event::HookError), THREE)
        .checked_by(|test| fails_on_all(test, "the hook has had enough")),
    scenario("a_forward_alone_is_found", |group| train(group, Event::ForwardOnly), THREE)
        .checked_by(out_of_step),
    scenario("a_loss_of_others_is_found", |group| train(group, Event::OtherLoss), THREE)
        .checked_by(out_of_step),
    scenario("a_caught_error_is_found", |group| train(group, Event::Caught), THREE)
        .checked_by(out_of_step),
    scenario(
        "a_forward_alone_with_buffers_is_found",
        |group| train(group, Event::ForwardOnlyWithBuffers),
        THREE,
    )
    .checked_by(|test| {
        all_fail(test, &["ranks disagree", "called all_reduce", "step 6)", "called broadcast"]);
    }),
    scenario("a_kept_forward_is_found", |group| train(group, Event::ForwardKept), TWO).checked_by(
        |test| {
            let steps = ["in step 7", "in step 8"];
            let cause = "one of them skipped a backward";
            all_fail(test, &["ranks disagree", steps[0], steps[1], cause]);
        },
    ),
    scenario("all_may_leave_a_backward_out", |group| train(group, Event::AllForwardOnly), TWO),
    scenario("all_may_keep_a_forward", |group| train(group, Event::AllForwardKept), TWO),
    scenario("one_may_evaluate", |group| train(group, Event::Evaluates), TWO),
    scenario("an_error_on_all_is_final", |group| train(group, Event::AllFail), TWO)
        .checked_by(all_errors_are_final),
    scenario(
        "after_an_error_on_all_the_model_can_be_wrapped_again",
        |group| train(group, Event::AllFailAndWrap),
        TWO,
    ),
    scenario("a_parameter_that_one_rank_thaws_is_named", |group| train(group, Event::Thaw), THREE)
        .checked_by(names_the_thawed),
    scenario("nothing_survives_the_launcher", |group| train(group, Event::Nothing), &[launched(3)])
        .checked_by(nothing_survives),
    scenario(
        "sixteen_ranks_train_on_whatever_cores_there_are",
        |group| train(group, Event::FiveSteps),
        &[launched(16)],
    ),
];

#[derive(Clone, Copy, PartialEq)]
enum Event {
    Exit,
    Kill,
    Hang,
    Panic,
    Thaw,
    HookPanic,
    HookError,
    ForwardOnly,
    ForwardOnlyWithBuffers,
    ForwardKept,
    OtherLoss,
    /// A backward fails before it comes to the model's gradients.
    Caught,
    /// On all ranks, which then take three more steps.
    AllForwardOnly,
    AllForwardKept,
    /// Rank 1 evaluates the model in each of eight steps.
    Evaluates,
    AllFail,
    AllFailAndWrap,
    /// Prints its steps, and goes on until it is killed.
    Nothing,
    /// Ends well.
    FiveSteps,
}

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn train(group: &ProcessGroup, event: Event) -> Result<()> {
    if event == Event::Hang {
        group.set_timeout(Duration::from_secs(2));
    }
    let store = VarStore::new(group.device());
    // Between the layers a tensor that is no parameter, whose hook runs when one bucket is ready
    // and another is not.
    let gate = Tensor::ones([1], FLOAT).set_requires_grad(true);
    let between = gate.shallow_clone();
    let mut net = nn::seq_t()
        .add(nn::linear(store.root() / "fc1", 784, 512, Default::default()))
        .add_fn(move |x| x.relu() * &between)
        .add(nn::linear(store.root() / "fc2", 512, 10, Default::default()));
    if event == Event::ForwardOnlyWithBuffers {
        net = net.add(nn::batch_norm1d(store.root() / "norm", 10, Default::default()));
    }
    let frozen = (store.root() / "frozen").ones("weight", &[1]).set_requires_grad(false);
    let mut model = Ddp::builder(group).bucket_cap_mb(0.01).wrap(net, &store)?;
    let mut optimizer = nn::Sgd::default().build(&store, 0.01)?;

    let loss = |model: &Ddp<nn::SequentialT>| {
        model.forward_t(&Tensor::randn([8, 784], FLOAT), true).square().mean(Kind::Float)
    };
    let steps = match event {
        Event::AllForwardOnly | Event::AllForwardKept | Event::Evaluates => 8,
        Event::FiveSteps => 5,
        _ => usize::MAX,
    };
    let mut _hook = None;
    let mut kept = Vec::new();
    for step in 0..steps {
        if event == Event::Nothing {
            println!("step {step} pid {}", std::process::id());
            std::io::stdout().flush()?;
        }
        if group.rank() == 1 && step == 5 {
            match event {
                Event::Exit => std::process::exit(3),
                Event::Kill => kill_process(getpid(), Signal::KILL)?,
                Event::Hang => std::thread::sleep(Duration::from_secs(3600)),
                Event::Panic => panic!("the model cannot go on"),
                Event::Thaw => drop(frozen.set_requires_grad(true)),
                Event::HookPanic => {
                    _hook = Some(GradHook::install(&gate, |_| panic!("the hook cannot go on"))?);
                }
                Event::HookError => {
                    _hook =
                        Some(GradHook::install(&gate, |_| Err("the hook has had enough".into()))?);
                }
                Event::ForwardOnly | Event::ForwardOnlyWithBuffers => {
                    drop(loss(&model));
                    continue;
                }
                Event::ForwardKept => {
                    kept.push(loss(&model));
                    continue;
                }
                Event::OtherLoss => {
                    (&gate * 2).f_backward()?;
                    drop(loss(&model));
                    continue;
                }
                Event::Caught => {
                    let last = Tensor::ones([1], FLOAT).set_requires_grad(true);
                    let _fails = GradHook::install(&last, |_| {
                        Err("before any gradient of the model".into())
                    })?;
                    ensure!((loss(&model) * &last).f_backward().is_err(), "a hook has failed");
                    continue;
                }
                _ => {}
            }
        }
        if step == 5 && matches!(event, Event::AllForwardOnly | Event::AllForwardKept) {
            kept.push(loss(&model));
            if event == Event::AllForwardOnly {
                kept.clear();
            }
            continue;
        }
        if event == Event::Evaluates && group.rank() == 1 {
            kept.push(tch::no_grad(|| loss(&model)));
            kept.push(model.forward_t(&Tensor::randn([8, 784], FLOAT), false));
        }
        if step == 5 && matches!(event, Event::AllFail | Event::AllFailAndWrap) {
            _hook = Some(GradHook::install(&gate, |_| Err("no rank can go on".into()))?);
        }
        optimizer.zero_grad();
        if let Err(error) = loss(&model).f_backward().map_err(Error::from_backward) {
            drop(_hook.take());
            let again = optimizer.try_backward_step(&loss(&model)).err();
            let again = again.map_or("no error".into(), |error| described(&error));
            if event != Event::AllFailAndWrap {
                bail!("step {step}: {}, again: {again}", described(&error));
            }
            model = Ddp::builder(group).bucket_cap_mb(0.01).wrap(model.into_inner(), &store)?;
            optimizer.try_backward_step(&loss(&model))?;
            return Ok(());
        }
        optimizer.step();
    }
    Ok(())
}

/// The error's kind and its text.
fn described(error: &Error) -> String {
    let kind = match error {
        Error::Comm(CommError::PeerLost { .. }) => "PeerLost",
        Error::Comm(CommError::Timeout { .. }) => "Timeout",
        Error::Comm(CommError::Mismatch { .. }) => "Mismatch",
        Error::Comm(CommError::Poisoned { .. }) => "Poisoned",
        Error::Model { .. } => "Model",
        Error::Backward { .. } => "Backward",
        _ => "another",
    };
    format!("{kind}: {error}")
}

/// How each rank ended that was started by hand.
fn finish(test: &Test) -> Vec<Finished> {
    test.ranks().into_iter().map(|rank| rank.finish(DETECTION_LIMIT)).collect()
}

fn ends_with(test: &Test, code: i32, reason: &str) {
    let job = test.launcher().finish(DETECTION_LIMIT);
    assert_eq!(job.code, Some(code), "{}", job.stderr);
    assert_contains(&job.stderr, &["rank 1 (local rank 1, pid ", reason]);
}

/// As rank 1 unwinds it leaves its group, and rank 0 may end with the error of that before rank 1 has ended:
/// flow-launch has the code of the one that ends first.
fn reports_a_panic(test: &Test) {
    let job = test.launcher().finish(DETECTION_LIMIT);
    assert!([Some(101), Some(1)].contains(&job.code), "{}", job.stderr);
    assert_contains(&job.stderr, &["the model cannot go on", "rank 1 "]);
}

/// Of the two ranks that wait, one may end before the other has printed its time-out, and flow-launch
/// then stops the other: the first one's error has the time-out, too.
fn names_who_hangs(test: &Test) {
    let job = test.launcher().finish(DETECTION_LIMIT);
    assert_eq!(job.code, Some(1), "{}", job.stderr);
    assert_contains(&job.stderr, &["step 5: ", "all_reduce", "bucket", "step 6)"]);
    assert_contains(&job.stderr, &["timed out after 2s", "waited for rank 1 (pid "]);
}

fn names_who_is_gone(test: &Test) {
    let ranks = finish(test);
    let gone = format!("rank 1 (pid {} on ", ranks[1].pid);
    for rank in [0, 2] {
        let Finished { code, stderr, .. } = &ranks[rank];
        assert_eq!(*code, Some(1), "{stderr}");
        let [first, again] =
            ["all_reduce #", "backward failed"].map(|it| format!("rank {rank}: {it}"));
        let first = format!("step 5: PeerLost: {first}");
        assert_contains(stderr, &[&first, "bucket", &gone, "died"]);
        let again = format!("again: Poisoned: {again}: the process group is unusable");
        assert_contains(stderr, &[&again, &gone]);
    }
}

fn fails_on_all(test: &Test, reason: &str) {
    let ranks = finish(test);
    let cause = "rank 1 aborted the group: its backward failed before all gradients were there";
    let again = |rank| format!("again: Poisoned: rank {rank}: backward failed: ");
    let own = format!("step 5: Backward: backward: {reason}");
    assert_contains(&ranks[1].stderr, &[&own, &again(1), cause]);
    for rank in [0, 2] {
        let first = format!("step 5: Poisoned: rank {rank}: all_reduce #");
        assert_contains(&ranks[rank].stderr, &[&first, &again(rank), cause]);
    }
    assert!(ranks.iter().all(|rank| rank.code == Some(1)));
}

fn out_of_step(test: &Test) {
    for (rank, Finished { code, stderr, .. }) in finish(test).into_iter().enumerate() {
        assert_eq!(code, Some(1), "{stderr}");
        let own = if rank == 1 { "step 6: " } else { "step 5: " };
        assert_contains(&stderr, &[own, "ranks disagree", "one of them skipped a backward"]);
        let names = |one: &str, other: &str| stderr.contains(&format!("{one}, rank {other}"));
        let [zero, two] = [0, 2].map(|other| {
            names("rank 1 is in step 7", &format!("{other} in step 6"))
                || names(&format!("rank {other} is in step 6"), "1 in step 7")
        });
        assert!(zero || two, "{stderr}");
    }
}

fn all_fail(test: &Test, reasons: &[&str]) {
    for Finished { code, stderr, .. } in finish(test) {
        assert_eq!(code, Some(1), "{stderr}");
        assert_contains(&stderr, reasons);
    }
}

fn all_errors_are_final(test: &Test) {
    let ranks = finish(test);
    for (rank, Finished { stderr, .. }) in ranks.iter().enumerate() {
        let again =
            format!("again: Poisoned: rank {rank}: backward failed: the process group is unusable");
        assert_contains(stderr, &["step 5: ", &again, "wrap the model again"]);
    }
    // A rank may learn of the other's error before it comes to its own.
    let own = "step 5: Backward: backward: no rank can go on";
    assert!(ranks.iter().any(|rank| rank.stderr.contains(own)));
    assert!(ranks.iter().all(|rank| rank.code == Some(1)));
}

fn names_the_thawed(test: &Test) {
    let ranks = finish(test);
    let reason = "frozen.weight was frozen when the model was wrapped and is not now: call refresh, or wrap it again";
    let own = format!("step 5: Model: rank 1: Ddp: {reason}");
    assert_contains(&ranks[1].stderr, &[&own, "again: Poisoned: "]);
    for rank in [0, 2] {
        let others = ["step 5: Poisoned: ", "rank 1 aborted the group: ", reason];
        assert_contains(&ranks[rank].stderr, &others);
    }
}

fn nothing_survives(test: &Test) {
    let mut job = test.launcher();
    job.wait_for("step 20 ");
    signal(&job, Signal::KILL);
    let output = job.finish(DETECTION_LIMIT).stdout;
    let mut pids: Vec<&str> = output.lines().filter_map(|line| line.split(' ').nth(3)).collect();
    pids.sort_unstable();
    pids.dedup();
    assert_eq!(pids.len(), 3, "{output}");
    // Their memory has no name, and goes with the last of them.
    let deadline = Instant::now() + DETECTION_LIMIT;
    while let Some(pid) = pids.iter().find(|pid| runs(pid)) {
        assert!(Instant::now() < deadline, "process {pid} has survived");
        std::thread::sleep(Duration::from_millis(10));
    }
    let names = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    assert_eq!(names.filter(|name| name.file_name().to_string_lossy().contains("flow")).count(), 0);
}

/// Whether the process is there and no zombie.
fn runs(pid: &str) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    status
        .rsplit(')')
        .next()
        .is_some_and(|fields| !fields.trim().is_empty() && !fields.trim().starts_with(['Z', 'X']))
}
