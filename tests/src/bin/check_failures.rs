//! Fails in a given way, as one of several ranks, and tells what error came of it: a line with the
//! error's kind and its message, then one with those of the next call.

use std::time::Duration;

use anyhow::{bail, Context, Result};
use flow_comm::{Error, ProcessGroup, ReduceOp};
use nix::sys::signal::{kill, SigSet, Signal};
use nix::unistd::Pid;

/// Elements that go through staging buffers, in several chunks.
const LARGE: usize = 200_000;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut deaf = SigSet::empty();
    deaf.add(Signal::SIGTERM);
    if arguments.contains(&"deaf") {
        deaf.thread_block()?;
    }
    let group = match ProcessGroup::from_env() {
        Ok(group) => group,
        Err(error) => {
            println!("{}", describe(&error));
            return Ok(());
        }
    };
    let outcome = match arguments[..] {
        ["join"] => Ok(()),
        ["loop", what, ..] => endless(&group, what, None),
        ["loop_timeout", what, seconds] => {
            group.set_timeout(Duration::from_secs_f64(seconds.parse()?));
            endless(&group, what, None)
        }
        ["die_in_loop", what, ..] => endless(&group, what, Some(20)),
        ["leave"] if group.rank() == 1 => {
            group.barrier()?;
            drop(group);
            println!("left");
            sleep_until_killed();
        }
        ["exit"] if group.rank() == 1 => {
            group.barrier()?;
            std::process::exit(0);
        }
        ["leave" | "exit"] => group.barrier().and_then(|()| sum(&group)),
        ["absent"] if group.rank() == 2 => {
            println!("absent");
            sleep_until_killed();
        }
        ["absent"] => {
            group.set_timeout(Duration::from_secs(1));
            sum(&group)
        }
        ["late", seconds] if group.rank() == 1 => {
            std::thread::sleep(Duration::from_secs_f64(seconds.parse()?));
            sum(&group)
        }
        ["late", _] => sum(&group),
        ["hang_once"]
            if group.rank() == 1
                && std::env::var("TORCHELASTIC_RESTART_COUNT").as_deref() == Ok("0") =>
        {
            sleep_until_killed();
        }
        ["hang_once"] => sum(&group),
        ["abort", by] if by.parse() == Ok(group.rank()) => {
            group.barrier()?;
            group.abort("the data ran out");
            sum(&group)
        }
        ["abort", _] => group.barrier().and_then(|()| sum(&group)),
        // Ranks 1 and 2 make a group that rank 1 never uses.
        ["unused", way, order] => {
            let part = group.new_group(&[1, 2])?;
            if group.rank() == 0 {
                println!("no error");
                sleep_until_killed();
            }
            let Some(part) = part else { bail!("it is a member") };
            let is_first = (group.rank() == 1) == (order == "before");
            if !is_first {
                std::thread::sleep(Duration::from_millis(500));
            }
            match way {
                _ if group.rank() == 2 => {}
                "die" => drop(kill(Pid::this(), Signal::SIGKILL)),
                "leave" => {}
                _ => part.abort("the data ran out"),
            }
            if group.rank() == 1 {
                drop(part);
                sleep_until_killed();
            }
            let outcome = sum(&part);
            tell(outcome, &part);
            return Ok(());
        }
        ["message_then_exit"] if group.rank() == 0 => {
            group.send(&vec![7_u8; 9], 1)?;
            return Ok(());
        }
        ["message_then_exit"] => {
            std::thread::sleep(Duration::from_millis(300));
            let mut message = [0_u8; 9];
            let result = group.recv(&mut message, 0);
            println!("received {message:?}");
            result.and_then(|()| group.recv(&mut message, 0))
        }
        // A rank waits for a message while one that has no part in it leaves.
        ["message_past"] if group.rank() == 1 => return Ok(()),
        ["message_past"] if group.rank() == 0 => {
            std::thread::sleep(Duration::from_secs(1));
            group.send(&[7_u8; 9], 2)
        }
        ["message_past"] => {
            let mut message = [0_u8; 9];
            let result = group.recv(&mut message, 0);
            println!("received {message:?}");
            result
        }
        // A rank that has never sent anything has ended.
        ["message_of_ended"] if group.rank() > 0 => return Ok(()),
        ["message_of_ended"] => group.recv(&mut [0_u8; 9], group.world_size() - 1),
        ["message_too_long"] if group.rank() == 0 => group.recv(&mut [0_u8; 9], 1),
        ["message_too_long"] => group.send(&vec![7_u8; 16 << 20], 0),
        // Rank 0 waits for a message with tag 5 from rank 1, or from any rank.
        ["message_wait", from] if group.rank() == 0 => {
            println!("waiting");
            receive(&group, from)
        }
        ["message_wait", _] => sleep_until_killed(),
        ["message_late", from] if group.rank() == 0 => {
            group.set_timeout(Duration::from_secs(1));
            receive(&group, from)
        }
        // Others come all the time.
        ["message_late", _] if group.rank() == 1 => loop {
            if let Err(error) = group.send_with_tag(&vec![1_u8; 300_000], 0, 4) {
                break Err(error);
            }
        },
        ["message_late", _] => sleep_until_killed(),
        ["message_left_behind"] if group.rank() == 1 => {
            group.send_with_tag(&[7_u8; 9], 0, 4)?;
            return Ok(());
        }
        ["message_left_behind"] => {
            std::thread::sleep(Duration::from_millis(300));
            let mut message = [0_u8; 9];
            let result = group.recv_any(&mut message, 4);
            println!("received {message:?}");
            result.and_then(|_| receive(&group, "one"))
        }
        // Rank 1, whose turn is the first, has died when rank 0 asks for a message of any rank;
        // rank 2's is there.
        ["message_beside_death"] if group.rank() == 1 => {
            group.send_with_tag(&[i64::from(std::process::id())], 0, 3)?;
            group.recv(&mut [0_u8], 0)?;
            let _ = kill(Pid::this(), Signal::SIGKILL);
            sleep_until_killed();
        }
        ["message_beside_death"] if group.rank() == 2 => {
            group.send_with_tag(&[7_u8; 9], 0, 5)?;
            group.send_with_tag(&[0_u8], 0, 3)?;
            sleep_until_killed();
        }
        ["message_beside_death"] => {
            let mut pid = [0_i64];
            group.recv_with_tag(&mut [0_u8], 2, 3)?;
            group.recv_with_tag(&mut pid, 1, 3)?;
            group.send(&[0_u8], 1)?;
            let status = format!("/proc/{}/stat", pid[0]);
            while std::fs::read_to_string(&status).is_ok_and(|status| !status.contains(") Z ")) {
                std::thread::sleep(Duration::from_millis(10));
            }
            let mut message = [0_u8; 9];
            let result = group.recv_any(&mut message, 5);
            println!("received {message:?}");
            result.and_then(|_| receive(&group, "any"))
        }
        ["message_of_other_type", _] if group.rank() == 1 => {
            let sent = group.send_with_tag(&[1.0_f32; 5], 0, 5);
            sent.and_then(|()| group.send_with_tag(&[7_u8; 9], 0, 4))
        }
        ["message_of_other_type", "kept"] => {
            let kept = group.recv_with_tag(&mut [0_u8; 9], 1, 4);
            kept.and_then(|()| receive(&group, "one"))
        }
        ["message_of_other_type", from] => receive(&group, from),
        ["mismatch", what] => mismatch(&group, what)?,
        ["apart"] => {
            let part = group.duplicate()?;
            let outcome = mismatch(&part, "operation")?;
            sum(&group)?;
            println!("the parent group works");
            tell(outcome, &part);
            return Ok(());
        }
        _ => bail!("there is no scenario {arguments:?}"),
    };
    tell(outcome, &group);
    Ok(())
}

fn tell(outcome: Result<(), Error>, group: &ProcessGroup) {
    match outcome {
        Ok(()) => println!("no error"),
        Err(error) => {
            println!("{}", describe(&error));
            match group.barrier() {
                Ok(()) => println!("then no error"),
                Err(error) => println!("then {}", describe(&error)),
            }
        }
    }
}

/// The kind of the error, and its text.
fn describe(error: &Error) -> String {
    let kind = format!("{error:?}");
    let kind: String = kind.chars().take_while(|c| c.is_alphanumeric()).collect();
    format!("{kind}: {error}")
}

fn receive(group: &ProcessGroup, from: &str) -> Result<(), Error> {
    match from {
        "any" => group.recv_any(&mut [0_u8; 9], 5).map(drop),
        _ => group.recv_with_tag(&mut [0_u8; 9], 1, 5),
    }
}

fn sum(group: &ProcessGroup) -> Result<(), Error> {
    group.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum)
}

fn sleep_until_killed() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(60));
    }
}

/// Collectives until one fails. Rank 1 kills itself after `lives` of them, if given.
fn endless(group: &ProcessGroup, what: &str, lives: Option<usize>) -> Result<(), Error> {
    let mut shared = group.alloc_shared::<f32>(LARGE)?;
    let mut ordinary = vec![1.0_f32; LARGE];
    let mut gathered = vec![0.0_f32; LARGE * group.world_size()];
    let (next, previous) =
        ((group.rank() + 1) % group.world_size(), (group.rank() + group.world_size() - 1));
    for round in 0.. {
        if round == 3 {
            println!("looping");
        }
        if lives == Some(round) && group.rank() == 1 {
            let _ = kill(Pid::this(), Signal::SIGKILL);
        }
        match what {
            "small" => group.all_reduce(&mut ordinary[..7], ReduceOp::Avg)?,
            "shared" => group.all_reduce(&mut shared, ReduceOp::Avg)?,
            "ordinary" => group.all_reduce(&mut ordinary, ReduceOp::Avg)?,
            "gather" => group.all_gather(&ordinary, &mut gathered)?,
            "async" => ordinary = group.all_reduce_async(ordinary, ReduceOp::Avg)?.wait()?,
            _ => {
                let sent = group.send_async(ordinary, next)?;
                group.recv(&mut gathered[..LARGE], previous % group.world_size())?;
                ordinary = sent.wait()?;
            }
        }
    }
    Ok(())
}

/// Rank 1 does something else than the others.
fn mismatch(group: &ProcessGroup, what: &str) -> Result<Result<(), Error>> {
    let odd = group.rank() == 1;
    let mut data = [0.0_f32; 4];
    group.barrier()?;
    Ok(match what {
        "operation" if odd => group.broadcast(&mut data, 0),
        "operation" => group.all_reduce(&mut data, ReduceOp::Sum),
        "count" => group.all_reduce(&mut data[usize::from(odd)..], ReduceOp::Sum),
        "much" => group.all_reduce(&mut vec![0.0_f32; if odd { LARGE } else { 4 }], ReduceOp::Sum),
        "much_gathered" => {
            let count = if odd { 4 } else { LARGE };
            group.all_gather(&vec![0_u8; count], &mut vec![0_u8; count * group.world_size()])
        }
        "dtype" if odd => group.all_reduce(&mut [0_i32; 4], ReduceOp::Sum),
        "dtype" => group.all_reduce(&mut data, ReduceOp::Sum),
        "reduction" => group.all_reduce(&mut data, if odd { ReduceOp::Max } else { ReduceOp::Sum }),
        "root" => group.broadcast(&mut data, usize::from(odd)),
        "new_group" if odd => group.new_group(&[0]).map(drop),
        "new_group" => group.barrier(),
        "asynchronous" if odd => group.barrier_async()?.wait(),
        "asynchronous" => group.all_reduce_async(vec![0_u8; 3], ReduceOp::Sum)?.wait().map(drop),
        _ => return Err(anyhow::anyhow!("mismatch in {what}?")).context("check_failures"),
    })
}
