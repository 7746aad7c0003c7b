//! Groups of one process, and libraries that are loaded.

mod env;
mod in_process;
mod nccl_bindings;
mod nccl_library;
