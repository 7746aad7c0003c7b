//! Errors of the planner.

/// An input that the planner cannot use. Each message is one line and says what would be right.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text is no JSON, or a field is missing, unknown, or of another type.
    #[error("{field}: {reason}")]
    Json {
        /// The path to the field, as `transformer.hidden`.
        field: String,
        /// The reason, with line and column.
        reason: serde_json::Error,
    },
    /// A field has a value that cannot be.
    #[error("{field} is {value}: {need}")]
    Field {
        /// The path to the field.
        field: String,
        /// The value.
        value: String,
        /// The valid values.
        need: &'static str,
    },
    /// The layout does not fit the model or the batch.
    #[error("{layout}: {reason}")]
    Layout {
        /// The layout.
        layout: String,
        /// The reason, and a valid value.
        reason: String,
    },
    /// A measured run, one of several, has an error.
    #[error("run {name:?}: {error}")]
    Run {
        /// The run's name.
        name: String,
        /// The error of the run.
        error: Box<Error>,
    },
    /// No layout of so many ranks has all the wanted parts and divides the model and the batch.
    #[error("no layout of {ranks} ranks is possible: {reason}")]
    Impossible {
        /// The number of ranks.
        ranks: usize,
        /// The reason.
        reason: String,
    },
}

/// Result with this crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Makes an [`Error::Field`].
    pub(crate) fn field(
        field: impl Into<String>,
        value: impl ToString,
        need: &'static str,
    ) -> Self {
        Self::Field { field: field.into(), value: value.to_string(), need }
    }
}

/// The largest number that an input may have. Products of several such numbers are still finite.
const LARGEST: f64 = 1e30;

/// Returns an error unless `value` is from 1e-30 to 1e30.
pub(crate) fn positive(field: impl Into<String>, value: f64) -> Result<()> {
    if (1.0 / LARGEST..=LARGEST).contains(&value) {
        return Ok(());
    }
    Err(Error::field(field, value, "give a number above 0, from 1e-30 to 1e30"))
}

/// Returns an error unless `value` is from 0 to 1e30.
pub(crate) fn not_negative(field: impl Into<String>, value: f64) -> Result<()> {
    if (0.0..=LARGEST).contains(&value) {
        return Ok(());
    }
    Err(Error::field(field, value, "give a number from 0 to 1e30"))
}

/// Returns an error unless `value` is from 0 to 1.
pub(crate) fn share(field: &'static str, value: f64) -> Result<()> {
    if (0.0..=1.0).contains(&value) {
        return Ok(());
    }
    Err(Error::field(field, value, "give a share from 0 to 1"))
}
