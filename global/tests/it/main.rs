//! Global tensors: operations, models, checkpoints, on ranks that are threads.

mod api;
mod boxing;
mod checkpoint;
mod checkpoint_random;
mod clip;
mod common;
mod complex;
mod cudnn;
mod data_parallel;
mod execute;
mod full_disk;
mod fully_sharded;
mod grad_scaler;
mod half;
mod models;
mod nn;
mod operations;
mod outside;
mod page;
mod partial_sums;
mod planner;
mod record;
mod sequence;
mod sizes;
mod views;
mod zero;
