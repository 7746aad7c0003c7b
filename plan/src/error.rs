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
        field: &'static str,
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

/// An error unless `value` is a number above 0.
pub(crate) fn positive(field: &'static str, value: f64) -> Result<()> {
    match value.is_finite() && value > 0.0 {
        true => Ok(()),
        false => {
            Err(Error::Field { field, value: value.to_string(), need: "give a number above 0" })
        }
    }
}

/// An error unless `value` is a number of at least 0.
pub(crate) fn not_negative(field: &'static str, value: f64) -> Result<()> {
    match value.is_finite() && value >= 0.0 {
        true => Ok(()),
        false => Err(Error::Field {
            field,
            value: value.to_string(),
            need: "give a number of at least 0",
        }),
    }
}

/// An error unless `value` is from 0 to 1.
pub(crate) fn share(field: &'static str, value: f64) -> Result<()> {
    match (0.0..=1.0).contains(&value) {
        true => Ok(()),
        false => {
            Err(Error::Field { field, value: value.to_string(), need: "give a share from 0 to 1" })
        }
    }
}
