//! Process groups over shared memory: collectives on CPU, on one node and between nodes.
//!
//! | file | subject |
//! |---|---|
//! | `arena` | the memory all local ranks map, and its allocator |
//! | `arena_header` | what the ranks of a node share while they come together |
//! | `bytes` | memory as bytes and as elements |
//! | `control` | counters, descriptors and staging buffers of one group |
//! | `engine` | rounds: publishing, waiting |
//! | `collectives` | collectives that read from peers, one a file |
//! | `contribution` | what ranks contribute to these, and who reads it |
//! | `reduction` | all_reduce, reduce, and the bucket reductions of data-parallel training |
//! | `p2p` | send and recv |
//! | `p2p_receive` | how messages find their receivers |
//! | `message_queue` | one sender's messages, with those that came before a receive |
//! | `internode` | members on other nodes: connections, news of failures |
//! | `internode_exchange` | what the nodes' leaders exchange: descriptors and blocks |
//! | `hierarchical` | reductions in a node, then between nodes |
//! | `io_segment` | memory that is lent to a transport |
//!
//! All `unsafe` code of the crate is in here, in `fork`, in `nccl` and in `transport::mpi::session`.

pub mod arena;
pub mod arena_header;
pub mod bytes;
pub mod collectives;
pub mod contribution;
pub mod control;
pub mod engine;
pub mod hierarchical;
pub mod internode;
pub mod internode_exchange;
pub mod io_segment;
pub mod message_queue;
pub mod p2p;
pub mod p2p_receive;
pub mod reduction;
