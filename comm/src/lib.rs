//! placeholder
pub mod env;
pub mod store;
