//! Probes of other hosts: the doctor there, started as `--hosts` starts agents.

use std::ffi::OsString;
use std::time::Duration;

use crate::doctor::command::{last_line, output};
use crate::doctor::fact::{Examination, Fact, State};
use crate::hosts::agents::{self, Place};
use crate::job::HostEntry;
use crate::net;

/// Returns whether flow-launch can be started on a host, and what is broken there.
pub fn host(
    host: &HostEntry,
    remote_shell: &[String],
    place: &Place,
    timeout: Duration,
) -> Vec<Fact> {
    let name = host.destination();
    if net::is_local(&host.name) {
        return vec![Fact::ok(&name, "this machine, which needs no ssh")];
    }
    let doctor = ["doctor".into(), "--json".into(), timeout_flag(timeout)];
    let mut command: Vec<OsString> = remote_shell.iter().map(OsString::from).collect();
    command.extend([OsString::from(&name), agents::script(place, &doctor)]);
    let shell = remote_shell.join(" ");
    // The doctor there has as long for each of its probes, and has to be reached.
    let output = match output(command, 2 * timeout) {
        Ok(output) => output,
        Err(why) => {
            return vec![Fact::ok(&name, why).broken(format!(
                "`{shell} {name} true` must work without a password; is the host there?"
            ))];
        }
    };
    let read = serde_json::from_str::<Examination>(&last_line(&output.stdout));
    let Ok(there) = read else {
        return vec![Fact::ok(&name, last_line(&output.stderr)).broken(format!(
            "`{shell} {name} true` must work without a password, and flow-launch be there, as \
             new as here"
        ))];
    };
    facts(&name, there)
}

fn timeout_flag(timeout: Duration) -> OsString {
    format!("--timeout={}", timeout.as_secs_f64()).into()
}

fn facts(name: &str, there: Examination) -> Vec<Fact> {
    let broken = there.count(State::Broken);
    let advice = there.count(State::Advice);
    let version = &there.version;
    let value = format!("flow-launch {version} there; {broken} broken, advice on {advice}");
    let reached = Fact::ok(name, value);
    let mut facts = vec![if version == env!("CARGO_PKG_VERSION") {
        reached
    } else {
        reached.broken(format!("flow-launch must be {} there too", env!("CARGO_PKG_VERSION")))
    }];
    let broken = there.facts.into_iter().filter(|fact| fact.state == State::Broken);
    facts.extend(broken.map(|fact| Fact { subject: format!("{name}: {}", fact.subject), ..fact }));
    facts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_broken_there_is_told_here() {
        let there = |version: &str| Examination {
            version: version.into(),
            host: "b".into(),
            facts: vec![
                Fact::ok("cores", "2"),
                Fact::ok("PyTorch", "none").advise("one"),
                Fact::ok("driver", "gone").broken("restart"),
            ],
        };
        let found = facts("b", there(env!("CARGO_PKG_VERSION")));
        assert_eq!((found.len(), found[0].state), (2, State::Ok));
        assert!(found[0].value.ends_with("1 broken, advice on 1"), "{}", found[0].value);
        assert_eq!(found[1], Fact::ok("b: driver", "gone").broken("restart"));
        assert_eq!(facts("b", there("0.0.0"))[0].state, State::Broken);
    }
}
