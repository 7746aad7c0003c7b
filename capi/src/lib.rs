//! flow-comm's process groups as C functions. `include/flow_comm.h` documents each of them; nothing
//! of that is repeated here.
//!
//! | file | subject |
//! |---|---|
//! | `status` | what functions return, and the text of the last error |
//! | `arguments` | checks of what C passes: texts, lists, places for results |
//! | `memory` | elements that belong to the caller, and blocks of shared memory |
//! | `group` | joining, sub-groups, timeouts |
//! | `collectives` | collectives |
//! | `messages` | send and receive |
//! | `interrupt` | what ends waits |
//! | `python` | signals of Python's, which end waits |
//! | `buckets` | reductions that do not wait |
//!
//! Nothing that C can pass makes these functions panic, and a panic of what they call is an error.

mod arguments;
mod buckets;
mod collectives;
mod group;
mod interrupt;
mod memory;
mod messages;
mod python;
mod status;
