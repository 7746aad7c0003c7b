//! Pipelines, on ranks that are threads.

mod common;
mod dropout;
mod failures;
mod models;
mod replicas;
mod reports;
mod stages;
mod steps;
