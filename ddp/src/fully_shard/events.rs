//! What ranks have done together since the last step: it must be the same on all.

use flow_comm::digest;

use super::unit::{Reduction, Unit};

/// Events that are remembered one by one.
const EVENTS: usize = 4096;

#[derive(Default)]
pub(super) struct Events(Vec<Event>);

#[derive(Hash)]
enum Event {
    /// Gathered the module of this parameter.
    Gather(String),
    /// Reduced the gradients of the module of this parameter, of which some have not come.
    Reduce(String, Vec<Vec<bool>>),
    /// Many, of which only a digest is left.
    Earlier(u64),
}

impl Events {
    /// Notes that a module was gathered.
    pub fn gathered(&mut self, unit: &Unit) {
        self.note(Event::Gather(unit.name.clone()));
    }

    /// Notes that a module's gradients are reduced.
    pub fn reduced(&mut self, unit: &Unit, reductions: &[Reduction]) {
        let mut incomplete = Vec::new();
        for reduction in reductions {
            if reduction.have_come.contains(&false) {
                incomplete.push(reduction.have_come.clone());
            }
        }
        self.note(Event::Reduce(unit.name.clone(), incomplete));
    }

    fn note(&mut self, event: Event) {
        if self.0.len() == EVENTS {
            let earlier = Event::Earlier(digest(&self.0));
            self.0 = vec![earlier];
        }
        self.0.push(event);
    }

    /// Describes the events, each in a line.
    pub fn lines(&self) -> Vec<String> {
        self.0.iter().map(describe).collect()
    }
}

fn describe(event: &Event) -> String {
    match event {
        Event::Gather(name) => format!("gathered the module of {name}"),
        Event::Reduce(name, incomplete) if incomplete.is_empty() => {
            format!("reduced the gradients of the module of {name}")
        }
        Event::Reduce(name, incomplete) => {
            let come: Vec<u8> =
                incomplete.iter().flatten().map(|&has_come| has_come.into()).collect();
            format!(
                "reduced the gradients of the module of {name} but those of some parameters (1: it has \
                 one) {come:?}"
            )
        }
        Event::Earlier(digest) => format!("gone through many modules, digest {digest:x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_bounded_and_differ_for_ever() {
        let mut one = Events::default();
        let mut other = Events::default();
        other.note(Event::Gather("a".to_owned()));
        for _ in 0..3 * EVENTS {
            one.note(Event::Gather("b".to_owned()));
            other.note(Event::Gather("b".to_owned()));
            assert!(one.0.len() <= EVENTS);
            assert_ne!(one.lines(), other.lines());
        }
    }
}
