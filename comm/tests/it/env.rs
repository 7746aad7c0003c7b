//! What a process takes from its environment.

use flow_comm::env::{Membership, Rendezvous};
use flow_comm::store::Address;

/// Reads `NAME=VALUE` words as an environment.
fn membership(environment: &str) -> Result<Membership, String> {
    let vars: Vec<(&str, &str)> =
        environment.split_whitespace().map(|word| word.split_once('=').unwrap()).collect();
    Membership::from_vars(|name| vars.iter().find(|var| var.0 == name).map(|var| var.1.to_string()))
        .map_err(|error| error.to_string())
}

#[test]
fn places() {
    const STORE: &str = "FLOW_STORE=tcp://h:1 FLOW_TOKEN=t";
    // Environment; rank, world size, local rank, local world size.
    let cases = [
        ("", [0, 1, 0, 1]),
        ("RANK=0 WORLD_SIZE=1", [0, 1, 0, 1]),
        ("RANK=1 WORLD_SIZE=2", [1, 2, 1, 2]),
        ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", [1, 2, 1, 2]),
        ("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", [3, 4, 1, 2]),
        (
            "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=3",
            [2, 3, 2, 3],
        ),
        (
            "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1",
            [2, 3, 0, 1],
        ),
        (
            "SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=3 SLURM_STEP_TASKS_PER_NODE=4 SLURM_NODEID=0",
            [3, 4, 3, 4],
        ),
        (
            "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=6 SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=2(x3) SLURM_NODEID=2",
            [5, 6, 1, 2],
        ),
        (
            "SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=3 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_NODEID=1",
            [2, 3, 0, 1],
        ),
        (
            "SLURM_PROCID=6 SLURM_STEP_NUM_TASKS=9 SLURM_LOCALID=2 SLURM_STEP_TASKS_PER_NODE=2(x2),3,2 SLURM_NODEID=2",
            [6, 9, 2, 3],
        ),
        // A batch script, or salloc's shell: one process, whatever the job has reserved.
        ("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0 SLURM_NODEID=0", [0, 1, 0, 1]),
        // torchrun under srun, and under mpirun.
        ("RANK=1 WORLD_SIZE=2 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1", [1, 2, 1, 2]),
        ("RANK=1 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", [1, 2, 1, 2]),
        // mpirun in a Slurm job.
        (
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1",
            [1, 2, 1, 2],
        ),
    ];
    for (environment, [rank, world_size, local_rank, local_world_size]) in cases {
        let rendezvous =
            Rendezvous::Server { address: Address::Tcp("h:1".to_string()), token: "t".to_string() };
        let node =
            environment.split_whitespace().find_map(|word| word.strip_prefix("SLURM_NODEID="));
        let node = node
            .filter(|_| environment.contains("STEP_NUM_TASKS") && !environment.contains("WORLD"));
        let node = node.map(|node| node.parse().unwrap());
        let expected =
            Membership { rank, world_size, local_rank, local_world_size, node, rendezvous };
        assert_eq!(membership(&format!("{environment} {STORE}")), Ok(expected), "{environment}");
    }
}

#[test]
fn contradictions_are_named() {
    // Environment; what the error must say.
    let cases: [(&str, &[&str]); 22] = [
        ("RANK=0", &["RANK=0 but WORLD_SIZE is not set"]),
        ("WORLD_SIZE=2", &["WORLD_SIZE=2 but RANK is not set"]),
        ("RANK=2 WORLD_SIZE=2", &["RANK=2 but WORLD_SIZE=2", "0 to 1"]),
        ("RANK=1 WORLD_SIZE=1", &["RANK=1 but WORLD_SIZE=1", "must be 0"]),
        ("RANK=0 WORLD_SIZE=0", &["WORLD_SIZE=0", "at least one"]),
        ("RANK=-1 WORLD_SIZE=2", &["RANK=\"-1\"", "whole number, 0 or more"]),
        ("RANK=one WORLD_SIZE=2", &["RANK=\"one\""]),
        ("RANK= WORLD_SIZE=2", &["RANK=\"\""]),
        ("RANK=0 WORLD_SIZE=99999999999999999999", &["WORLD_SIZE=\"99999999999999999999\""]),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2",
            &["LOCAL_RANK=2 but LOCAL_WORLD_SIZE=2", "0 to 1"],
        ),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=2", &["LOCAL_RANK=2 but WORLD_SIZE=2"]),
        ("RANK=3 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2", &["RANK=3 but LOCAL_WORLD_SIZE=2"]),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=4",
            &["LOCAL_WORLD_SIZE=4 but WORLD_SIZE=2"],
        ),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=0",
            &["LOCAL_WORLD_SIZE=0", "at least one"],
        ),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=x", &["LOCAL_RANK=\"x\""]),
        ("OMPI_COMM_WORLD_RANK=0", &["OMPI_COMM_WORLD_RANK=0 but OMPI_COMM_WORLD_SIZE is not set"]),
        ("SLURM_PROCID=4 SLURM_STEP_NUM_TASKS=4", &["SLURM_PROCID=4 but SLURM_STEP_NUM_TASKS=4"]),
        (
            "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2 SLURM_NODEID=0",
            &["SLURM_STEP_TASKS_PER_NODE=\"2(x2\"", "2(x3),1"],
        ),
        (
            "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_NODEID=2",
            &["SLURM_NODEID=2", "lists 2 nodes"],
        ),
        (
            "RANK=0 WORLD_SIZE=2 FLOW_STORE=tcp://h:1",
            &["FLOW_STORE=tcp://h:1 but FLOW_TOKEN is not set"],
        ),
        ("RANK=0 WORLD_SIZE=2 FLOW_TOKEN=secret", &["FLOW_TOKEN is set but FLOW_STORE is not"]),
        (
            "RANK=0 WORLD_SIZE=2 FLOW_STORE=h:1 FLOW_TOKEN=secret",
            &["FLOW_STORE", "\"h:1\"", "tcp://HOST:PORT"],
        ),
    ];
    for (environment, parts) in cases {
        let error = membership(environment).expect_err(environment);
        assert!(parts.iter().all(|part| error.contains(part)), "{environment}: {error}");
        assert!(!error.contains('\n') && !error.contains("secret"), "{environment}: {error}");
    }
}

#[test]
fn without_a_store_rank_zero_serves_one() {
    assert_eq!(membership("").unwrap().rendezvous, Rendezvous::None);
    assert_eq!(
        membership("RANK=0 WORLD_SIZE=1 MASTER_ADDR=h").unwrap().rendezvous,
        Rendezvous::None
    );

    let at = |environment: &str| match membership(environment).unwrap().rendezvous {
        Rendezvous::RankZero { address: Address::Unix(name), token } => (name, token),
        other => panic!("{environment}: {other:?}"),
    };
    let first = at("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1 HOME=/a");
    assert_eq!(first, at("RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1 HOME=/b"));
    assert!(
        first.0.starts_with("flow-") && !first.1.is_empty() && !first.0.contains(&first.1),
        "{first:?}"
    );
    let mut others: Vec<_> = [
        "",
        "MASTER_ADDR=h MASTER_PORT=1",
        "MASTER_ADDR=h MASTER_PORT=2",
        "TORCHELASTIC_RUN_ID=a",
        "PMIX_NAMESPACE=a",
        "OMPI_MCA_ess_base_jobid=1",
        "SLURM_JOB_ID=1 SLURM_STEP_ID=0",
        "SLURM_JOB_ID=1 SLURM_STEP_ID=1",
        "SLURM_JOB_ID=2 SLURM_STEP_ID=1",
    ]
    .iter()
    .flat_map(|job| [format!("RANK=0 WORLD_SIZE=2 {job}"), format!("RANK=0 WORLD_SIZE=3 {job}")])
    .map(|environment| at(&environment).0)
    .collect();
    others.sort();
    others.dedup();
    assert_eq!(others.len(), 18, "every job has its own address");
}

#[test]
fn several_nodes_need_a_place_to_meet() {
    let place = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1";
    let error = membership(place).unwrap_err();
    assert!(
        error.contains("4 ranks, 2 of them on this node") && error.contains("MASTER_ADDR"),
        "{error}"
    );
    let error = membership(&format!("{place} MASTER_ADDR=h MASTER_PORT=99999")).unwrap_err();
    assert!(error.contains("MASTER_PORT=\"99999\""), "{error}");

    let with_store = membership(&format!("{place} FLOW_STORE=unix://s FLOW_TOKEN=secret")).unwrap();
    assert_eq!(
        format!("{:?}", with_store.rendezvous),
        "Server(unix://s)",
        "a token is not for logs"
    );
    assert_eq!(with_store.node, Some(1));

    let slurm = "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_NODEID=0 SLURM_JOB_ID=12345";
    for (environment, served) in [
        (format!("{place} MASTER_ADDR=h MASTER_PORT=7"), "tcp://h:7"),
        (format!("{place} MASTER_ADDR=fd00::1 MASTER_PORT=7"), "tcp://[fd00::1]:7"),
        (
            format!("{place} MASTER_ADDR=h MASTER_PORT=7 TORCHELASTIC_USE_AGENT_STORE=True"),
            "tcp://h:8",
        ),
        (format!("{slurm} SLURM_STEP_NODELIST=n[003-005,7],m1"), "tcp://n003:22345"),
        (format!("{slurm} SLURM_STEP_NODELIST=gpu-a,gpu-b"), "tcp://gpu-a:22345"),
    ] {
        let Rendezvous::RankZero { address, token } = membership(&environment).unwrap().rendezvous
        else {
            panic!("{environment}: rank 0 is to serve");
        };
        assert_eq!(address.to_string(), served, "{environment}");
        assert!(!token.is_empty());
    }
    let token = |environment: &str| match membership(environment).unwrap().rendezvous {
        Rendezvous::RankZero { token, .. } => token,
        other => panic!("{other:?}"),
    };
    assert_eq!(token(&format!("{place} MASTER_ADDR=h MASTER_PORT=7 FLOW_TOKEN=secret")), "secret");
}
