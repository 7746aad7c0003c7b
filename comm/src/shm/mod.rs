//! Shared memory: what the ranks of a node map, and the back-end of process groups over it.
//!
//! | file | subject |
//! |---|---|
//! | `arena` | the memory all local ranks map, and its allocator |
//! | `join_memory` | what the ranks of a node share while they come together |
//! | `tenancy` | when the memory of processes that have ended is free |
//! | `segments` | pieces of the arena that are reduced as one: a bucket of gradients |
//! | `bytes` | memory as bytes and as elements |
//! | `control` | counters, descriptors and staging buffers of one group |
//! | `rounds` | the protocol beneath all collectives: publishing, arriving, waiting |
//! | `contribution` | what ranks contribute to a collective, and who reads it |
//! | `io_segment` | memory that is lent to a transport |
//! | `machine_buffer` | memory that the ranks of a machine have in common |
//! | `mapped_file` | memory that outlives a process |
//!
//! `collectives`, `p2p` and `internode` are built on these.

pub mod arena;
pub mod bytes;
pub mod contribution;
pub mod control;
pub mod distance;
pub mod io_segment;
pub mod join_memory;
pub mod machine_buffer;
pub mod mapped_file;
pub mod rounds;
pub mod segments;
pub mod tenancy;
