//! What is wrong with an input of the planner.

/// An input that the planner cannot work with. Each message is one line and says what would be
/// right.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text is no JSON, or a field is missing, unknown, or of another type.
    #[error("{field}: {reason}")]
    Json {
        /// The path to the field, as `transformer.hidden`.
        field: String,
        /// What is wrong, with line and column.
        reason: serde_json::Error,
    },
    /// A field has a value that cannot be.
    #[error("{field} is {value}: {need}")]
    Field {
        /// The path to the field.
        field: String,
        /// The value.
        value: String,
        /// What would be right.
        need: &'static str,
    },
    /// The model and the batch cannot be laid out so.
    #[error("{layout}: {reason}")]
    Layout {
        /// The layout.
        layout: String,
        /// Why not, and what would be right.
        reason: String,
    },
    /// One of several measured runs.
    #[error("run {name:?}: {error}")]
    Run {
        /// The run's name.
        name: String,
        /// What is wrong with it.
        error: Box<Error>,
    },
    /// No layout of so many ranks has all the wanted parts and divides the model and the batch.
    #[error("no layout of {ranks} ranks is possible: {reason}")]
    Impossible {
        /// The number of ranks.
        ranks: usize,
        /// What would have to change.
        reason: String,
    },
}

/// A result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// [`Error::Field`].
    pub(crate) fn field(
        field: impl Into<String>,
        value: impl ToString,
        need: &'static str,
    ) -> Self {
        Self::Field { field: field.into(), value: value.to_string(), need }
    }
}

/// The largest number that is taken: products of several are still numbers.
const LARGEST: f64 = 1e30;

/// An error unless `value` is above 0, from 1e-30 to 1e30.
pub(crate) fn positive(field: impl Into<String>, value: f64) -> Result<()> {
    match (1.0 / LARGEST..=LARGEST).contains(&value) {
        true => Ok(()),
        false => Err(Error::field(field, value, "give a number above 0, from 1e-30 to 1e30")),
    }
}

/// An error unless `value` is from 0 to 1e30.
pub(crate) fn not_negative(field: impl Into<String>, value: f64) -> Result<()> {
    match (0.0..=LARGEST).contains(&value) {
        true => Ok(()),
        false => Err(Error::field(field, value, "give a number from 0 to 1e30")),
    }
}

/// An error unless `value` is from 0 to 1.
pub(crate) fn share(field: &'static str, value: f64) -> Result<()> {
    match (0.0..=1.0).contains(&value) {
        true => Ok(()),
        false => Err(Error::field(field, value, "give a share from 0 to 1")),
    }
}
