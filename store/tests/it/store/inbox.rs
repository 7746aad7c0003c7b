//! Messages to the process that serves the store, and wills.

use super::*;

#[test]
fn messages_arrive_in_order() {
    let server = serve();
    no_post(&server);
    let store = client(&server);
    for message in ["a", "", "c"] {
        store.send(message.as_bytes()).unwrap();
    }
    for message in ["a", "", "c"] {
        assert_eq!(next_message(&server), message);
    }
    no_post(&server);
    store.send(b"d").unwrap();
    assert_eq!(next_message(&server), "d");
}

#[test]
fn messages_that_nobody_reads_are_refused_at_some_point() {
    let server = serve();
    let store = client(&server);
    store.will(b"gone", LONG).unwrap();
    let message = vec![0; 20 << 20];
    let error = (0..10).find_map(|_| store.send(&message).err()).expect("200 MiB unread");
    assert!(
        matches!(error, Error::Rejected { .. }) && error.to_string().contains("unread"),
        "{error}"
    );
    // The will that was accepted is executed even so.
    drop(store);
    while next_message(&server) != "gone" {}
    let store = client(&server);
    let error = (0..100_000).find_map(|_| store.send(b"").err()).expect("100,000 unread");
    assert!(matches!(error, Error::Rejected { .. }), "{error}");
    assert!(matches!(store.will(b"gone", LONG).unwrap_err(), Error::Rejected { .. }));
    assert!(matches!(store.will(&vec![0; 100_000], LONG).unwrap_err(), Error::Rejected { .. }));
    store.set("key", b"the connection stays usable").unwrap();
}

#[test]
fn a_will_is_executed_once_when_its_connection_ends() {
    let server = serve();
    let store = client(&server);
    store.will(b"not this", LONG).unwrap();
    store.will(b"gone", LONG).unwrap();
    no_post(&server);
    drop(store);
    assert_eq!(next_message(&server), "gone");
    let store = client(&server);
    store.will(b"not this", LONG).unwrap();
    store.will(b"", LONG).unwrap();
    drop(store);
    no_post(&server);
    // A client that is cut off for what it sends, and one that dies while it waits.
    for then in [
        frame(&[77]),
        frame(&[&[2], &3u32.to_le_bytes()[..], b"key", &60_000_000u64.to_le_bytes()].concat()),
    ] {
        let mut stream = admitted(&server);
        assert_eq!(ask(&mut stream, &frame(&will("gone", LONG))), [0]);
        stream.write_all(&then).unwrap();
        drop(stream);
        assert_eq!(next_message(&server), "gone");
    }
    no_post(&server);
}

fn will(message: &str, silence: Duration) -> Vec<u8> {
    let silence = silence.as_micros() as u64;
    [&[7], &(message.len() as u32).to_le_bytes()[..], message.as_bytes(), &silence.to_le_bytes()]
        .concat()
}

#[test]
fn a_will_is_executed_when_its_client_is_silent() {
    let server = serve();
    let (idle, waiting, alive) = (client(&server), client(&server), client(&server));
    let silence = 60 * SHORT;
    alive.will(b"alive", silence).unwrap();
    idle.will(b"idle", 4 * SHORT).unwrap();
    let begin = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            waiting.will(b"waiting", silence).unwrap();
            waiting.get("never", LONG).unwrap_err()
        });
        let mut gone = Vec::new();
        while gone.len() < 2 {
            assert!(begin.elapsed() < LONG);
            alive.get("never", 2 * SHORT).unwrap_err();
            gone.extend(server.inbox().try_next());
        }
        assert_eq!(gone, [&b"idle"[..], b"waiting"]);
        assert!(begin.elapsed() >= silence);
    });
    assert!(matches!(idle.try_get("key").unwrap_err(), Error::Lost { .. }));
    drop(alive);
    assert_eq!(next_message(&server), "alive");
}

/// A server whose process was stopped for longer than a client may be silent has not heard it, but
/// it was not silent.
#[test]
fn a_stopped_server_takes_no_client_for_silent() {
    const CHILD: &str = "FLOW_TEST_STOPPED_SERVER";
    const SILENCE: Duration = Duration::from_secs(2);
    if std::env::var_os(CHILD).is_some() {
        let server = serve();
        println!("served at {}", server.address());
        loop {
            let message = next_message(&server);
            server.set("sent", message.as_bytes());
        }
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--exact",
            "store::inbox::a_stopped_server_takes_no_client_for_silent",
            "--nocapture",
        ])
        .env(CHILD, "1");
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let address = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .find_map(|line| {
            line.unwrap().split_once("served at ").map(|(_, address)| address.parse().unwrap())
        })
        .unwrap();
    let connect = || Store::connect(&address, TOKEN, LONG).unwrap();
    let signal = |signal| kill_process(Pid::from_child(&child), signal).unwrap();
    let (waiting, asking, end) = (connect(), connect(), AtomicBool::new(false));
    for store in [&waiting, &asking] {
        store.will(b"gone", SILENCE).unwrap();
        store.set_reply_timeout(LONG);
    }
    thread::scope(|scope| {
        scope.spawn(|| {
            while !end.load(Ordering::Relaxed) {
                waiting.get("never", 2 * SHORT).unwrap_err();
            }
        });
        scope.spawn(|| {
            while !end.load(Ordering::Relaxed) {
                asking.try_get("never").unwrap();
                thread::sleep(SHORT);
            }
        });
        thread::sleep(4 * SHORT);
        signal(Signal::STOP);
        thread::sleep(2 * SILENCE);
        signal(Signal::CONT);
        thread::sleep(4 * SHORT);
        end.store(true, Ordering::Relaxed);
    });
    for store in [&waiting, &asking] {
        assert_eq!(store.try_get("sent").unwrap(), None);
    }
    drop(waiting);
    assert_eq!(asking.get("sent", LONG).unwrap(), b"gone");
    child.kill().unwrap();
    child.wait().unwrap();
}
