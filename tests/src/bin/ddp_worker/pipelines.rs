//! Pipelines between processes: what the tests of flow-pipeline check on threads, and ranks that die.

#[path = "../../../../pipeline/tests/it/common/mod.rs"]
mod common;

use crate::models;
use anyhow::{Result, ensure};
use common::{Model, mesh};
use flow_comm::{Mesh, ProcessGroup};
use flow_ddp::Ddp;
use flow_global::{B, GlobalTensor, Placement, S, distribute};
use flow_pipeline::{DdpStage, Pipeline, Schedule, stage_fn};
use flow_tests::registry::{Job, Scenario, Test, by_hand, launched, process, scenario};
use flow_tests::{DETECTION_LIMIT, Finished, Process, assert_contains};
use nix::sys::signal::{SigSet, Signal as Masked};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};

const JOBS: &[Job] = &[launched(2), launched(4), by_hand(&[1, 1]), on_gpus(launched(2))];
/// Tensors go over the fake NCCL, and are on the CPU: there is no fake libtorch.
const fn on_gpus(job: Job) -> Job {
    job.mode("tensors on the CPU", "FLOW_TEST_HOST_AS_GPU", "1").on_fake_cuda()
}

const FOUR: &[Job] = &[launched(4), on_gpus(launched(4))];
const FAILED: &[Job] = &[by_hand(&[2]), by_hand(&[4]), on_gpus(by_hand(&[2]))];
const THREE: &[Job] = &[by_hand(&[3]), by_hand(&[1, 1, 1])];
const GRID: &[Job] = &[launched(4).flags(&["--grace", "20"])];

pub const SCENARIOS: &[Scenario] = &[
    scenario("trained", trained, JOBS),
    scenario("trained_with_replicas", trained_with_replicas, FOUR),
    process(
        "the_timeline_shows_each_forward_and_backward",
        traced,
        &[by_hand(&[2]), on_gpus(by_hand(&[2]))],
    )
    .checked_by(shows_stages),
    scenario("a_failed_stage_fails_all", failed, FAILED),
    scenario("survivors_name_a_killed_stage", killed, THREE).checked_by(names_who_is_gone),
    process("a_grid_of_ddp_names_a_killed_rank", || killed_in_a_grid(false), GRID)
        .checked_by(all_name_rank_3),
    process("a_grid_of_global_tensors_names_a_killed_rank", || killed_in_a_grid(true), GRID)
        .checked_by(all_name_rank_3),
];

/// Bit for bit what one process has.
fn trained(group: &ProcessGroup) -> Result<()> {
    common::DEVICE.get_or_init(models::device);
    let ranks = group.world_size();
    for schedule in [
        Schedule::gpipe(ranks, 5)?,
        Schedule::one_f_one_b(ranks, 5)?,
        Schedule::interleaved(ranks, 2, 2 * ranks)?,
        Schedule::zb_h1(ranks, 5)?,
        Schedule::zb_v(ranks, 5)?,
    ] {
        let (rows, stages) = (11, schedule.stages());
        let expected = Model::trained_alone(stages, rows, schedule.micro_batches());
        let model = Model::new(stages);
        let mut pipeline = Pipeline::builder(&mesh(group), "pp")
            .schedule(schedule.clone())
            .recompute(stages > ranks)
            .build(|stage| Ok(model.stage(stage)))?;
        goes_over_nccl_exactly_on_gpus(&pipeline)?;
        let losses = model.train(
            |x, y| pipeline.step(&[x], |outputs, part| Model::loss(outputs, &part.of(&y))),
            rows,
        );
        for (found, expected) in losses.into_iter().zip(&expected.losses) {
            let found = found?;
            ensure!(found.is_some() == pipeline.needs_targets(), "who has the loss");
            ensure!(found.is_none_or(|found| found == *expected), "the loss of {schedule:?}");
        }
        for stage in pipeline.stages() {
            let mut pairs = model.of_stage(stage).zip(expected.model.of_stage(stage));
            ensure!(pairs.all(|(found, expected)| found == expected), "stage {stage}");
        }
    }
    Ok(())
}

fn goes_over_nccl_exactly_on_gpus(pipeline: &Pipeline) -> Result<()> {
    let goes_over_nccl = format!("{pipeline:?}").contains("over_nccl: true");
    ensure!(goes_over_nccl == models::on_gpu(), "{pipeline:?}");
    Ok(())
}

/// pp 2 x dp 2, by `Ddp` and as global tensors; first and last stage share a weight.
fn trained_with_replicas(group: &ProcessGroup) -> Result<()> {
    common::DEVICE.get_or_init(models::device);
    let mesh = flow_comm::Mesh::new(group, &[0, 1, 2, 3], &[2, 2])?.with_names(&["pp", "dp"])?;
    for (name, recomputes) in [("1f1b", false), ("gpipe", true), ("zb-v", false)] {
        let schedule = Schedule::named(name, 2, 2, 3)?;
        let expected = common::replicas::gradients_alone(schedule.stages());
        for is_global in [false, true] {
            let mut replica =
                common::replicas::Replica::new(&mesh, &schedule, recomputes, is_global)?;
            goes_over_nccl_exactly_on_gpus(&replica.pipeline)?;
            for (stage, found) in replica.gradients()? {
                common::close(&found, &expected[stage]);
            }
        }
    }
    Ok(())
}

/// One step. Drops its groups before it ends: then the timeline is written.
fn traced() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    models::choose_device(&group)?;
    let model = Model::new(4);
    let mut pipeline = Pipeline::builder(&mesh(&group), "pp")
        .schedule(Schedule::zb_v(2, 3)?)
        .build(|stage| Ok(model.stage(stage)))?;
    let (x, y) = Model::batch(0, 6);
    pipeline.step(&[x], |outputs, part| Model::loss(outputs, &part.of(&y)))?;
    Ok(())
}

/// A backward is there once for each of its halves.
fn shows_stages(test: &Test) {
    let folder = test.folder.path().join("trace");
    let start = |mut command: std::process::Command| {
        command.env("FLOW_TRACE", &folder);
        Process::start(command)
    };
    let commands = test.commands();
    let is_on_gpus = commands[0].get_envs().any(|(name, _)| name == "FLOW_TEST_DEVICE");
    let ranks: Vec<Process> = commands.into_iter().map(start).collect();
    ranks.into_iter().for_each(|rank| drop(rank.finish(DETECTION_LIMIT)));
    for (rank, stages) in [(0, [0, 3]), (1, [1, 2])] {
        let text = std::fs::read(folder.join(format!("rank{rank}.json"))).expect("a timeline");
        let trace: Value = serde_json::from_slice(&text).expect("it is JSON");
        let mut counts = BTreeMap::new();
        let events = trace["traceEvents"].as_array().expect("a list");
        for event in events {
            if event["cat"] == "phase" {
                let args = &event["args"];
                let place = ["stage", "micro_batch"].map(|name| args[name].as_u64());
                let name = event["name"].as_str().expect("a name").to_owned();
                *counts.entry((name, place)).or_insert(0) += 1;
            }
        }
        let mut expected = BTreeMap::new();
        for (name, count) in [("forward", 1), ("backward", 2)] {
            for stage in stages {
                for micro_batch in 0..3 {
                    expected.insert((name.to_owned(), [Some(stage), Some(micro_batch)]), count);
                }
            }
        }
        assert_eq!(counts, expected, "rank {rank}");
        let goes_over_nccl = |event: &&Value| event["args"]["backend"] == "nccl";
        let messages = events.iter().filter(goes_over_nccl).count();
        assert_eq!(messages > 0, is_on_gpus, "rank {rank}");
    }
}

/// Rank 1 fails in its third forward, and so all.
fn failed(group: &ProcessGroup) -> Result<()> {
    let mut pipeline = Pipeline::builder(&mesh(group), "pp")
        .schedule(Schedule::one_f_one_b(group.world_size(), 4)?)
        .build(|stage| {
            let runs = AtomicUsize::new(0);
            Ok(stage_fn(move |inputs| {
                if stage == 1 && runs.fetch_add(1, Ordering::Relaxed) == 2 {
                    return Err("out of coffee".into());
                }
                Ok(vec![&inputs[0] * 2])
            }))
        })?;
    let x = Tensor::ones([4, 4], (Kind::Double, models::device())).set_requires_grad(true);
    let error = match pipeline.step(&[x], |outputs, _| outputs[0].mean(Kind::Double)) {
        Ok(_) => anyhow::bail!("the step has worked"),
        Err(error) => error.to_string(),
    };
    let cause = "rank 1: forward of stage 1, micro-batch 2 failed: out of coffee";
    ensure!(error.contains(cause), "{error}");
    Ok(())
}

/// Rank 1 is killed in its third forward.
fn killed(group: &ProcessGroup) -> Result<()> {
    let mut pipeline = Pipeline::builder(&mesh(group), "pp")
        .schedule(Schedule::one_f_one_b(3, 6)?)
        .build(|stage| {
            let runs = AtomicUsize::new(0);
            Ok(stage_fn(move |inputs| {
                if stage == 1 && runs.fetch_add(1, Ordering::Relaxed) == 2 {
                    kill_process(getpid(), Signal::KILL)?;
                }
                Ok(vec![&inputs[0] * 2])
            }))
        })?;
    let x = Tensor::ones([6, 4], (Kind::Double, Device::Cpu)).set_requires_grad(true);
    pipeline.step(&[x], |outputs, _| outputs[0].mean(Kind::Double))?;
    Ok(())
}

/// The survivors say what they waited for, and who has died.
fn names_who_is_gone(test: &Test) {
    let ranks: Vec<Finished> =
        test.ranks().into_iter().map(|rank| rank.finish(DETECTION_LIMIT)).collect();
    let waits = ["receive of the output's gradient of stage 0", "receive of the input of stage 2"];
    for (rank, waits) in [(0, waits[0]), (2, waits[1])] {
        let Finished { code, stderr, .. } = &ranks[rank];
        assert_eq!(*code, Some(1), "{stderr}");
        assert_contains(stderr, &[&format!("rank {rank}: {waits}, micro-batch "), "rank 1"]);
    }
}

/// dp 2 x pp 2: rank 3 is killed in the second step. The others do not react to SIGTERM, so that they
/// say what they have seen.
fn killed_in_a_grid(is_global: bool) -> Result<()> {
    let mut deaf = SigSet::empty();
    deaf.add(Masked::SIGTERM);
    deaf.thread_block()?;
    let group = ProcessGroup::from_env()?;
    let mesh = Mesh::new(&group, &[0, 1, 2, 3], &[2, 2])?.with_names(&["pp", "dp"])?;
    let placement = Placement::all(mesh.group("dp")?)?;
    let vs = VarStore::new(Device::Cpu);
    let mut builder = Pipeline::builder(&mesh, "pp").schedule(Schedule::one_f_one_b(2, 4)?);
    if is_global {
        builder = builder.placement(placement.clone());
    }
    let mut pipeline = builder.build(|_| {
        let layer = nn::linear(vs.root(), 4, 4, Default::default());
        if is_global {
            distribute(&vs, &placement, |_, _| [B])?;
        }
        let (rank, runs) = (group.rank(), AtomicUsize::new(0));
        let stage = stage_fn(move |inputs| {
            if rank == 3 && runs.fetch_add(1, Ordering::Relaxed) == 6 {
                kill_process(getpid(), Signal::KILL)?;
            }
            Ok(vec![layer.forward(&inputs[0])])
        });
        if is_global {
            Ok(stage)
        } else {
            Ok(Box::new(DdpStage(Ddp::new(stage, &vs, mesh.group("dp")?)?)))
        }
    })?;
    let local = Tensor::ones([8, 4], (Kind::Float, Device::Cpu));
    let x = if is_global { local.to_global(&placement, [S(0)])? } else { local };
    for _ in 0..3 {
        let step = pipeline.step(&[x.shallow_clone()], |y, _| y[0].square().mean(Kind::Float));
        if let Err(error) = step {
            println!("rank {} says: {error}", group.rank());
            return Err(error.into());
        }
    }
    Ok(())
}

/// Its peer in the pipeline, its replica, and the rank that is neither.
fn all_name_rank_3(test: &Test) {
    let job = test.launcher().finish(DETECTION_LIMIT);
    assert_eq!(job.code, Some(128 + 9), "{job:?}");
    for rank in 0..3 {
        let begin = format!("rank {rank} says: rank {rank}: ");
        let said = job.stdout.lines().find(|line| line.starts_with(&begin));
        let said = said.unwrap_or_else(|| panic!("rank {rank} says nothing: {job:?}"));
        assert_contains(said, &["rank 3 (pid "]);
    }
}
