//! Every collective against plain references, on every back-end: a table of collectives, for all
//! types and reductions, several sizes and roots. `runs` checks it on process groups (one node,
//! several, MPI; `host`) and on GPUs (`nccl`).
//!
//! A new collective is a line and a function in `table`.

mod backend;
mod host;
mod nccl;
mod nonblocking;
mod reference;
mod runs;
mod table;

use crate::registry::{Scenario, by_hand, in_process, launched, machines, mpirun, scenario};
pub use nccl::OnGpu;
pub use table::check_type;

pub const SCENARIOS: &[Scenario] = &[
    scenario(
        "all_are_right",
        runs::on_host,
        &[
            launched(1),
            launched(2),
            launched(3),
            launched(4),
            launched(5),
            in_process(1),
            in_process(3),
            in_process(4),
            by_hand(&[1, 1]),
            by_hand(&[1, 1, 1, 1]),
            by_hand(&[2, 2]),
            by_hand(&[1, 2, 3]),
            by_hand(&[2, 1]),
            machines(&[2, 2]),
            mpirun(&[4]),
            mpirun(&[2, 2]),
            mpirun(&[1, 1, 1, 1]),
        ],
    ),
    scenario(
        "large_ones_are_right",
        runs::large_on_host,
        &[launched(2), by_hand(&[1, 1]), mpirun(&[2, 2])],
    ),
    scenario(
        "groups_on_threads_are_right_at_once",
        runs::groups_at_once,
        &[launched(4), in_process(4), by_hand(&[2, 2]), mpirun(&[2, 2]), mpirun(&[1, 1, 1, 1])],
    ),
    scenario(
        "nonblocking_ones_overlap",
        nonblocking::all,
        &[
            launched(1),
            launched(3),
            in_process(3),
            by_hand(&[1, 1]),
            by_hand(&[1, 2, 3]),
            mpirun(&[2, 2]),
        ],
    ),
    scenario(
        "all_are_right_over_nccl",
        runs::over_nccl,
        &[
            launched(1).on_fake_cuda(),
            launched(2).on_fake_cuda(),
            launched(3).on_fake_cuda(),
            launched(4).on_fake_cuda(),
        ],
    ),
];
