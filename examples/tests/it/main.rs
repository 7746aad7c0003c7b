//! The examples, as their users run them.

mod bench;
mod checkpoint;
mod common;
mod elastic;
mod global;
mod gpt;
mod mnist;
mod mobilenet;
mod nano_gpt;
mod noise_scale;
mod started_by_others;
mod trace;
mod train;
mod views;
