//! The flags about nodes and their rendezvous.

use std::time::Duration;

use super::flag_table as table;
use super::settings::{LONGEST, Setting, Settings, host_and_number, seconds, unquoted};
use super::usage::Usage;
use crate::job::{NO_ID, Nodes, Rendezvous, RendezvousTimeouts};

/// Default port of `--master-addr` for several nodes, as in torchrun.
pub const MASTER_PORT: u16 = 29500;

/// Default port of `--rdzv-endpoint`, as in torchrun.
pub const ENDPOINT_PORT: u16 = 29400;

/// A node that is silent for this long is lost.
const HEARTBEAT: Duration = Duration::from_secs(8);

#[derive(Clone, Copy, PartialEq)]
enum Backend {
    Static,
    Endpoint,
}

/// Reads the flags about nodes.
pub fn nodes(settings: &Settings) -> Result<Nodes, Usage> {
    let nnodes = settings.get(table::NNODES).unwrap_or_else(|| Setting::preset("--nnodes", "1"));
    let (min, max) = range(&nnodes)?;
    let configuration = Configuration::of(settings)?;
    let backend = settings.get(table::RDZV_BACKEND).map(|setting| backend(&setting)).transpose()?;
    let local_addr = settings.get_host(table::LOCAL_ADDR)?;
    let master_addr = settings.get_host(table::MASTER_ADDR)?;
    let master_port = settings.get_number(table::MASTER_PORT, 1, "a port from 1 to 65535")?;
    let id = settings.get_text(table::RDZV_ID)?.unwrap_or_else(|| NO_ID.into());
    let timeouts = configuration.timeouts;
    // torchrun's variable.
    let has_agent_store = (settings.environment)("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
        .is_none_or(|value| value != "1");
    if settings.is_on(table::STANDALONE)? {
        if min > 1 {
            return Err(nnodes.wrong("1 with --standalone, which is for one node"));
        }
        let rendezvous = Rendezvous::Alone { master_addr: None, master_port: None };
        return Ok(Nodes {
            min: 1,
            max: 1,
            rendezvous,
            id: NO_ID.into(),
            local_addr,
            timeouts,
            has_agent_store,
        });
    }
    let endpoint = settings.get(table::RDZV_ENDPOINT);
    let by_endpoint = backend.map_or(endpoint.is_some(), |backend| backend == Backend::Endpoint);
    let node_rank = node_rank(settings, by_endpoint, max)?;
    let rendezvous = if max == 1 {
        Rendezvous::Alone { master_addr, master_port }
    } else if by_endpoint {
        let endpoint = endpoint
            .ok_or_else(|| nnodes.needs("--rdzv-endpoint HOST[:PORT], the same on every node"))?;
        let (host, port) = host_and_port(&endpoint)?;
        Rendezvous::Endpoint {
            host,
            port: port.unwrap_or(ENDPOINT_PORT),
            is_host: configuration.is_host,
        }
    } else if min != max {
        return Err(nnodes.needs("--rdzv-endpoint HOST[:PORT], for the number of nodes may change"));
    } else {
        let (host, port) = match endpoint {
            Some(endpoint) => host_and_port(&endpoint).map(|(host, port)| (Some(host), port))?,
            None => (master_addr, None),
        };
        let either = "--master-addr HOST, where node 0 runs, or --rdzv-endpoint HOST[:PORT]; the \
                      same on every node";
        let master_addr = host.ok_or_else(|| nnodes.needs(either))?;
        let master_port = port.or(master_port).unwrap_or(MASTER_PORT);
        Rendezvous::Static { node_rank, master_addr, master_port }
    };
    Ok(Nodes { min, max, rendezvous, id, local_addr, timeouts, has_agent_store })
}

/// Returns this node's rank, unless the rendezvous decides it.
fn node_rank(settings: &Settings, by_endpoint: bool, nodes: u32) -> Result<u32, Usage> {
    let Some(setting) = settings.get(table::NODE_RANK) else { return Ok(0) };
    let rank = setting.number(0, "a number from 0")?;
    if by_endpoint {
        settings.warn(format!(
            "{} is ignored: nodes that meet at an endpoint are numbered there",
            setting.source()
        ));
        return Ok(0);
    }
    if rank >= nodes {
        return Err(setting.wrong(&format!("below {nodes}, the number of nodes (--nnodes)")));
    }
    Ok(rank)
}

fn range(setting: &Setting) -> Result<(u32, u32), Usage> {
    let text = setting.text()?;
    let (min, max) = text.split_once(':').unwrap_or((text, text));
    match (min.parse(), max.parse()) {
        (Ok(min), Ok(max)) if 0 < min && min <= max => Ok((min, max)),
        _ => Err(setting.wrong("a number from 1, or MIN:MAX with MIN not above MAX")),
    }
}

fn backend(setting: &Setting) -> Result<Backend, Usage> {
    let right =
        "static or c10d: flow-launch keeps the rendezvous itself, there is no other service to run";
    match setting.text()? {
        "static" => Ok(Backend::Static),
        "c10d" => Ok(Backend::Endpoint),
        _ => Err(setting.wrong(right)),
    }
}

/// Reads `host`, `host:port`, `[v6]` or `[v6]:port`.
pub fn host_and_port(setting: &Setting) -> Result<(String, Option<u16>), Usage> {
    let found = host_and_number(setting.text()?.trim());
    found.filter(|(_, port)| *port != Some(0)).ok_or_else(|| {
        setting
            .wrong("HOST or HOST:PORT, with an IPv6 address in brackets and a port from 1 to 65535")
    })
}

/// `--rdzv-conf`.
struct Configuration {
    timeouts: RendezvousTimeouts,
    is_host: Option<bool>,
}

const KEYS: &str = "join_timeout (or else timeout), last_call_timeout, heartbeat_timeout, \
                    keep_alive_interval, keep_alive_max_attempt and is_host; read_timeout, \
                    close_timeout and store_type without meaning";

impl Configuration {
    fn of(settings: &Settings) -> Result<Configuration, Usage> {
        let mut configuration = Configuration {
            timeouts: RendezvousTimeouts {
                join: Duration::from_secs(600),
                last_call: Duration::from_secs(30),
                heartbeat: HEARTBEAT,
            },
            is_host: None,
        };
        let Some(setting) = settings.get(table::RDZV_CONF) else { return Ok(configuration) };
        let mut join = None;
        let mut timeout = None;
        let mut interval = None;
        let mut attempts = None;
        for text in setting.text()?.split(',').map(str::trim).filter(|text| !text.is_empty()) {
            let pair = Pair::of(&setting, text);
            match pair.key {
                "join_timeout" => join = Some(pair.time()?),
                "timeout" => timeout = Some(pair.time()?),
                "last_call_timeout" => configuration.timeouts.last_call = pair.time()?,
                "heartbeat_timeout" => configuration.timeouts.heartbeat = pair.time()?,
                "keep_alive_interval" => interval = Some(pair.time()?),
                "keep_alive_max_attempt" => {
                    let count = pair.value.parse().ok().filter(|count| (1..=1000).contains(count));
                    attempts = Some(count.ok_or_else(|| pair.wrong("a number from 1 to 1000"))?);
                }
                "is_host" => {
                    let is_host = truth(pair.value);
                    configuration.is_host =
                        Some(is_host.ok_or_else(|| pair.wrong("true or false"))?);
                }
                "read_timeout" | "close_timeout" | "store_type" => {}
                key if pair.value.is_empty() => {
                    return Err(Usage(format!(
                        "{} has '{key}' without a value; write KEY=VALUE,...",
                        setting.source()
                    )));
                }
                key => settings.warn(format!(
                    "{} has '{key}', which is ignored; there are {KEYS}",
                    setting.source()
                )),
            }
        }
        // PyTorch's LaunchConfig appends a timeout of its own, so join_timeout goes before timeout.
        configuration.timeouts.join = join.or(timeout).unwrap_or(configuration.timeouts.join);
        if interval.is_some() || attempts.is_some() {
            // torchrun's default for the one that is not given.
            configuration.timeouts.heartbeat =
                interval.unwrap_or(Duration::from_secs(5)) * attempts.unwrap_or(3);
        }
        Ok(configuration)
    }
}

/// `KEY=VALUE` of `--rdzv-conf`.
struct Pair<'a> {
    /// The flag or variable that has it.
    source: &'a str,
    key: &'a str,
    value: &'a str,
}

impl<'a> Pair<'a> {
    fn of(setting: &'a Setting, text: &'a str) -> Pair<'a> {
        let (key, value) = text.split_once('=').unwrap_or((text, ""));
        Pair { source: setting.source(), key: key.trim(), value: unquoted(value.trim()) }
    }

    fn wrong(&self, right: &str) -> Usage {
        let Pair { source, key, value } = self;
        Usage(format!("{source} has {key}={value}; {key} must be {right}"))
    }

    fn time(&self) -> Result<Duration, Usage> {
        let time = seconds(self.value).filter(|time| !time.is_zero());
        time.ok_or_else(|| self.wrong(&format!("a number of seconds above 0, at most {LONGEST}")))
    }
}

/// Reads the words that torchrun accepts.
fn truth(text: &str) -> Option<bool> {
    match text.to_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" => Some(true),
        "0" | "false" | "f" | "no" | "n" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{parse, refusal};
    use crate::job::{Nodes, Rendezvous};

    fn nodes(line: &str) -> Nodes {
        parse(&format!("{line} train")).unwrap().nodes
    }

    fn endpoint(text: &str) -> (String, u16) {
        match nodes(&format!("--nnodes 2 --rdzv-endpoint {text}")).rendezvous {
            Rendezvous::Endpoint { host, port, .. } => (host, port),
            other => panic!("{other:?}"),
        }
    }

    fn fixed(node_rank: u32, master_addr: &str, master_port: u16) -> Rendezvous {
        Rendezvous::Static { node_rank, master_addr: master_addr.into(), master_port }
    }

    #[test]
    fn one_node_is_alone_whatever_else_is_said() {
        let alone = Rendezvous::Alone { master_addr: None, master_port: None };
        for line in [
            "--nnodes 1",
            "--nnodes 1:1 --rdzv-backend c10d --rdzv-endpoint localhost:0",
            "--standalone --rdzv-endpoint nonsense:x --node-rank 3",
            "--standalone --nnodes 1:4",
            "--standalone --master-addr 192.0.2.1 --master-port 7",
            "--rdzv-backend static --node-rank 0",
        ] {
            assert_eq!((nodes(line).rendezvous, nodes(line).max), (alone.clone(), 1), "{line}");
        }
        let given = Rendezvous::Alone { master_addr: Some("::1".into()), master_port: Some(7) };
        assert_eq!(nodes("--master-addr [::1] --master-port 7").rendezvous, given);
        assert!(refusal("--standalone --nnodes 2 train").contains("--standalone"));
    }

    #[test]
    fn static_nodes() {
        assert_eq!(
            nodes("--nnodes 2 --master-addr a --node-rank 1").rendezvous,
            fixed(1, "a", 29500)
        );
        assert_eq!(
            nodes("--nnodes 2:2 --master-addr a --master-port 9").rendezvous,
            fixed(0, "a", 9)
        );
        let by_endpoint =
            "--nnodes 2 --rdzv-backend static --rdzv-endpoint b:7 --master-addr a --master-port 9";
        assert_eq!(nodes(by_endpoint).rendezvous, fixed(0, "b", 7));
        assert!(refusal("--nnodes 2 train").contains("--master-addr"));
        assert!(refusal("--nnodes 1:2 --master-addr a train").contains("--rdzv-endpoint"));
        assert!(refusal("--nnodes 2 --node-rank 2 --master-addr a train").contains("below 2"));
        assert_eq!(
            nodes("--nnodes 2 --master-addr a --master-port 65535").rendezvous,
            fixed(0, "a", 65535)
        );
    }

    #[test]
    fn endpoints() {
        assert_eq!(endpoint("node0"), ("node0".into(), 29400));
        assert_eq!(endpoint("node0.lan:5"), ("node0.lan".into(), 5));
        assert_eq!(endpoint("[::1]"), ("::1".into(), 29400));
        assert_eq!(endpoint("[fe80::1%eth0]:65535"), ("fe80::1%eth0".into(), 65535));
        for wrong in
            ["::1", "a:", "a:0", "a:65536", "a:b:1", "[::1]x:1", "[]:1", ":1", "a/b:1", "-a", "[a"]
        {
            assert!(
                refusal(&format!("--nnodes 2 --rdzv-endpoint {wrong} train"))
                    .contains("--rdzv-endpoint"),
                "{wrong}"
            );
        }
        let elastic = nodes(
            "--nnodes 1:4 --rdzv-endpoint a --rdzv-id job --local-addr 10.0.0.2 --node-rank 9",
        );
        assert_eq!((elastic.min, elastic.max), (1, 4));
        assert_eq!((elastic.id.as_str(), elastic.local_addr.as_deref()), ("job", Some("10.0.0.2")));
        assert!(refusal("--nnodes 2 --rdzv-backend c10d train").contains("--rdzv-endpoint"));
        for backend in ["etcd", "etcd-v2", "other"] {
            assert!(refusal(&format!("--rdzv-backend {backend} train")).contains("static or c10d"));
        }
    }

    #[test]
    fn numbers_of_nodes() {
        for wrong in ["0", "-1", "2:1", "0:2", "2:20:30", ":2", "x", "", "99999999999"] {
            assert!(refusal(&format!("--nnodes={wrong} train")).contains("--nnodes"), "{wrong}");
        }
    }

    #[test]
    fn configuration() {
        let timeouts = |conf: &str| {
            let timeouts = nodes(&format!("--rdzv-conf={conf}")).timeouts;
            [timeouts.join, timeouts.last_call, timeouts.heartbeat].map(|time| time.as_secs_f64())
        };
        assert_eq!(timeouts(""), [600.0, 30.0, 8.0]);
        assert_eq!(
            timeouts("join_timeout=1.5,last_call_timeout=2,heartbeat_timeout=3"),
            [1.5, 2.0, 3.0]
        );
        assert_eq!(timeouts("join_timeout=1,timeout=9"), [1.0, 30.0, 8.0]);
        assert_eq!(timeouts("timeout=9,join_timeout=1"), [1.0, 30.0, 8.0]);
        assert_eq!(timeouts("timeout=7,keep_alive_interval=4"), [7.0, 30.0, 12.0]);
        assert_eq!(timeouts("keep_alive_max_attempt=2,heartbeat_timeout=1"), [600.0, 30.0, 10.0]);
        assert_eq!(timeouts("read_timeout=1,close_timeout=1,store_type=file"), [600.0, 30.0, 8.0]);
        for (text, is_host) in
            [("is_host=1", Some(true)), ("is_host=False", Some(false)), ("timeout=1", None)]
        {
            let line = format!("--nnodes 2 --rdzv-endpoint a --rdzv-conf {text}");
            assert!(matches!(
                nodes(&line).rendezvous,
                Rendezvous::Endpoint { is_host: found, .. } if found == is_host
            ));
        }
        for wrong in [
            "join_timeout=0",
            "timeout=x",
            "is_host=2",
            "keep_alive_max_attempt=0",
            "timeout",
            "timeout=1e9",
        ] {
            let line = refusal(&format!("--rdzv-conf {wrong} train"));
            assert!(line.contains("--rdzv-conf") && line.contains("must be"), "{line}");
        }
        let job = parse("--rdzv-conf joint=1,timeout=5,joint=2,'x=1 train").unwrap();
        assert_eq!(job.nodes.timeouts.join.as_secs(), 5);
        let [first, second] = &job.warnings[..] else { panic!("{:?}", job.warnings) };
        assert!(first.contains("'joint'") && first.contains("join_timeout"), "{first}");
        assert!(second.contains("''x'"), "{second}");
        assert!(refusal("--rdzv-conf joint train").contains("KEY=VALUE"));
    }
}
