//! Who is admitted, and what those who are not cannot do.

use super::*;

#[test]
fn wrong_tokens_are_refused_at_once() {
    let server = serve();
    for token in ["", "0123456789abcdeX", "0123456789abcdef0", "0"] {
        let error = Store::connect(server.address(), token, LONG).unwrap_err();
        assert!(
            matches!(error, Error::Denied { .. }) && error.to_string().contains("FLOW_TOKEN"),
            "{error}"
        );
    }
    let mut stream = stranger(&server);
    let said = ask(&mut stream, &hello(9));
    assert_eq!(read_to_close(stream), b"");
    assert!(String::from_utf8_lossy(&said).contains(&format!("version {VERSION} of")), "{said:?}");
    assert!(Server::start(&Address::Tcp("127.0.0.1:0".to_string()), "").is_err());
}

#[test]
fn garbage_closes_only_its_own_connection() {
    let server = serve();
    let store = client(&server);
    let request_before_hello =
        frame(&[&[1], &1u32.to_le_bytes()[..], b"k", &1u32.to_le_bytes(), b"v"].concat());
    let garbage: [&[u8]; 7] = [
        b"GET / HTTP/1.1\r\n\r\n",
        &[0; 64],
        &[255; 100_000],
        &frame(&[0; 2000]),
        &frame(b"\0WOLF\x02"),
        &frame(&[]),
        &request_before_hello,
    ];
    for bytes in garbage {
        let mut stream = stranger(&server);
        // It may be cut off before it has sent everything.
        let _ = stream.write_all(bytes);
        assert_eq!(read_to_close(stream), b"", "{:?}", &bytes[..bytes.len().min(32)]);
    }
    let endless_list = frame(&[&[3][..], &u32::MAX.to_le_bytes()].concat());
    let not_utf8 = frame(&[&[1], &1u32.to_le_bytes()[..], b"\xff", &0u32.to_le_bytes()].concat());
    let too_long = [&((64u32 << 20) + 1).to_le_bytes(), &[0; 100][..]].concat();
    for bytes in [frame(&[77]), endless_list, not_utf8, too_long, hello(VERSION)] {
        let mut stream = admitted(&server);
        let _ = stream.write_all(&bytes);
        assert_eq!(read_to_close(stream), b"", "{:?}", &bytes[..bytes.len().min(32)]);
    }
    assert_eq!(store.try_get("k").unwrap(), None);
}

#[test]
fn half_a_frame_then_silence() {
    let server = serve();
    let mut before_hello = stranger(&server);
    before_hello.write_all(&hello(VERSION)[..7]).unwrap();
    let mut before_proof = stranger(&server);
    let challenge = ask(&mut before_proof, &hello(VERSION));
    before_proof.write_all(&proof(&challenge, TOKEN)[..20]).unwrap();
    let mut admitted = admitted(&server);
    admitted.write_all(&frame(&[1; 1000])[..500]).unwrap();
    let store = client(&server);
    store.set("key", b"value").unwrap();
    assert_eq!(store.get("key", LONG).unwrap(), b"value");
    assert_eq!(read_to_close(before_hello), b"");
    assert_eq!(read_to_close(before_proof), b"");
    store.set("key", b"value").unwrap();
}

#[test]
fn idle_strangers_do_not_keep_clients_out() {
    const WANTED: usize = 10_000;
    /// What the server and the tests beside this one need.
    const OTHERS: usize = 5_000;
    let most = raise_file_limit();
    let count = WANTED.min((most as usize).saturating_sub(OTHERS)).max(700);
    if count < WANTED {
        println!(
            "SKIPPED: {WANTED} idle connections: the limit on open files is {most}; {count} instead"
        );
    }
    let server = serve();
    let before = client(&server);
    let mut strangers: Vec<TcpStream> = (0..count)
        .map(|i| {
            if i % 100 == 0 {
                before.add("n", 1).unwrap();
            }
            stranger(&server)
        })
        .collect();
    let begin = Instant::now();
    let store = client(&server);
    println!("a client got in after {:?}, past {count} idle connections", begin.elapsed());
    assert_eq!(store.add("n", 1).unwrap(), (count / 100) as i64 + 1);
    // The oldest had to go.
    assert_eq!(read_to_close(strangers.swap_remove(0)), b"");
}

#[test]
fn strangers_that_come_and_go_or_dribble() {
    let server = serve();
    let store = client(&server);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = stranger(&server);
            // In time, a hello may come byte by byte.
            for byte in hello(VERSION) {
                stream.write_all(&[byte]).unwrap();
                thread::sleep(SHORT);
            }
            let challenge = ask(&mut stream, &[]);
            assert_eq!(ask(&mut stream, &proof(&challenge, TOKEN)), [0]);
        });
        scope.spawn(|| {
            let mut stream = stranger(&server);
            // Not so if it takes forever.
            let huge = [&60u32.to_le_bytes()[..], &[0; 60]].concat();
            assert!(huge.iter().any(|byte| {
                thread::sleep(10 * SHORT);
                stream.write_all(&[*byte]).is_err()
            }));
        });
        for _ in 0..1000 {
            drop(stranger(&server));
        }
        store.set("key", b"value").unwrap();
        assert_eq!(client(&server).get("key", LONG).unwrap(), b"value");
    });
}

#[test]
fn a_proof_is_good_for_its_own_challenge_only() {
    let server = serve();
    let mut heard = stranger(&server);
    let challenge = ask(&mut heard, &hello(VERSION));
    let mut stream = stranger(&server);
    ask(&mut stream, &hello(VERSION));
    let said = ask(&mut stream, &proof(&challenge, TOKEN));
    assert!(String::from_utf8_lossy(&said).contains("wrong token"), "{said:?}");
    assert_eq!(read_to_close(stream), b"");
}

/// As soon as the address is there, when there is no store yet.
#[test]
fn who_comes_while_the_server_starts_is_admitted() {
    for i in 0..300 {
        let name = format!("flow-test-start-{}-{i}", std::process::id());
        let (address, socket) =
            (Address::Unix(name.clone()), SocketAddr::from_abstract_name(&name).unwrap());
        thread::scope(|scope| {
            let clients: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        while UnixStream::connect_addr(&socket).is_err() {}
                        Store::connect(&address, TOKEN, LONG).map(drop)
                    })
                })
                .collect();
            let _server = Server::start(&address, TOKEN).unwrap();
            clients.into_iter().for_each(|client| client.join().unwrap().unwrap());
        });
    }
}
