//! The environment variables of this crate, read here only.

/// `FLOW_DDP_COPY=1`: every gradient is copied into its bucket, none is reduced where it is.
const COPY: &str = "FLOW_DDP_COPY";
/// The variable that says who reduces buckets on the CPU beside backward: `hooks` or `thread`.
const PROGRESS: &str = "FLOW_DDP_PROGRESS";

/// Settings that the environment asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    /// Gradients may be reduced where they are.
    pub in_place: bool,
    /// Whether a thread reduces buckets beside backward; None: where a core is to spare.
    pub progress_thread: Option<bool>,
}

impl Settings {
    /// Reads the environment. The error is one line that names the variable.
    pub fn from_env() -> Result<Self, String> {
        let progress_thread = match std::env::var(PROGRESS).as_deref() {
            Ok("hooks") => Some(false),
            Ok("thread") => Some(true),
            Ok(other) => return Err(format!("{PROGRESS}={other} must be \"hooks\" or \"thread\"")),
            Err(_) => None,
        };
        let in_place = std::env::var_os(COPY).is_none_or(|value| value != "1");
        Ok(Self { in_place, progress_thread })
    }
}
