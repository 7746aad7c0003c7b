//! How hard a job's life is.

use std::time::Duration;

use fastrand::Rng;

/// What goes wrong in a job, and how often.
pub struct Faults {
    /// What goes wrong can be seen in time, so only those that are interrupted give up.
    pub are_gentle: bool,
    /// Whether a launcher says who has ended.
    pub launched: bool,
    pub hosts: usize,
    pub size: usize,
    /// The timeout of calls.
    pub timeout: Duration,
    /// How long a message to or from the store is on its way at most.
    pub delay: Duration,
    /// How long a notice of an end takes at most.
    pub notice: Duration,
    /// The number of processes that crash, and the part of the store's requests at which one does.
    pub crashes: usize,
    pub crash_rate: f64,
    pub interrupts: usize,
    /// The part of the store's requests at which a connection ends.
    pub loss_rate: f64,
}

impl Faults {
    pub fn random(random: &mut Rng) -> Self {
        let are_gentle = random.bool();
        let seconds = Duration::from_secs_f64;
        Self {
            are_gentle,
            launched: random.u8(..4) > 0,
            hosts: random.usize(1..=3),
            size: random.usize(2..=5),
            timeout: if are_gentle { seconds(60.0) } else { seconds(2.0 + 8.0 * random.f64()) },
            delay: if are_gentle { seconds(0.3) } else { seconds(2.0 * random.f64().powi(2)) },
            notice: if are_gentle { seconds(2.0) } else { seconds(8.0 * random.f64()) },
            crashes: random.usize(..=6),
            crash_rate: random.f64().powi(2) * 0.03,
            interrupts: random.usize(..3),
            loss_rate: if are_gentle || random.bool() { 0.0 } else { 0.003 },
        }
    }

    /// Returns how long a call takes at most: it waits twice, and a round of looks is never longer
    /// than this many messages.
    pub fn bound(&self) -> Duration {
        2 * self.timeout + 100 * self.delay
    }
}
