//! A store that moves from one server to the next, in one process and in virtual time. The servers are the real
//! ones, without their sockets. Messages are late; connections end, or nothing arrives on them any more; servers
//! crash, freeze, and are cut off; replicas are lost and replaced. A seed decides everything, so a run that fails
//! can be repeated, and says what happens: `SIMULATION_SEED=n`.
//!
//! | file | what |
//! |---|---|
//! | `cluster.rs` | virtual time, and the network |
//! | `node.rs` | a server's side of connections, and a replica's |
//! | `leader.rs` | who serves, and who has the copy; as flow-launch's agents decide it |
//! | `client.rs` | clients, and what they must never see |

mod client;
mod cluster;
mod leader;
mod node;

use cluster::Cluster;

#[test]
fn nothing_that_was_acknowledged_is_lost_or_done_twice() {
    let chosen = std::env::var("SIMULATION_SEED").ok();
    let seeds: Vec<u64> = match &chosen {
        Some(seed) => vec![seed.parse().expect("SIMULATION_SEED is a number")],
        None => (0..1000).collect(),
    };
    let mut leaders = 0;
    let mut replicas = 0;
    let mut lost = 0;
    for seed in &seeds {
        let mut cluster = Cluster::new(*seed, chosen.is_some());
        cluster.run();
        if let Some(failure) = &cluster.failure {
            panic!("SIMULATION_SEED={seed}: at {:?}: {failure}", cluster.now);
        }
        leaders += cluster.term;
        replicas += cluster.replicas;
        lost += cluster.is_lost as usize;
    }
    println!("{leaders} leaders and {replicas} replicas in {} jobs, {lost} lost", seeds.len());
    if chosen.is_none() {
        assert!(leaders > seeds.len() && lost < seeds.len() / 2, "the faults are too hard");
    }
}
