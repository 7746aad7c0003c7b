//! Tests of scripts, README and whole models. Scenarios are a program of their own.

mod ddp;
mod kernels;
mod programs;
mod readme;
mod scripts;
