use std::net::{Ipv4Addr, TcpStream};
use std::thread;
use std::time::Instant;

use super::*;
use crate::shm::io_segment::IoSegment;

const TEST_TIMEOUT: Duration = Duration::from_secs(60);
const LARGE: usize = 40 << 20;
/// The group that all ranks are in.
const GROUP: &str = "group";

/// Transports of so many ranks, all in this process.
fn transports(size: usize) -> Vec<TcpTransport> {
    transports_at(size, |_| None)
}

/// Those that have `elsewhere` are taken to be there.
fn transports_at(
    size: usize,
    elsewhere: impl Fn(usize) -> Option<SocketAddr>,
) -> Vec<TcpTransport> {
    let open = |rank| {
        let (endpoint, thread) =
            Endpoint::open(rank, size, Ipv4Addr::LOCALHOST.into(), "token").unwrap();
        TcpTransport { endpoint, thread: Some(thread) }
    };
    let transports: Vec<_> = (0..size).map(open).collect();
    transports.iter().for_each(|transport| transport.join_group(GROUP));
    let own = transports.iter().map(|t| t.endpoint.address()).enumerate();
    let addresses: Vec<_> = own.map(|(rank, own)| elsewhere(rank).unwrap_or(own)).collect();
    for transport in &transports {
        transport.endpoint.addresses.set(addresses.clone()).unwrap();
    }
    transports
}

fn pair() -> [TcpTransport; 2] {
    transports(2).try_into().ok().unwrap()
}

fn channel(transport: &TcpTransport, name: &str) -> Box<dyn Connections> {
    channel_of(transport, GROUP, name)
}

fn channel_of(transport: &TcpTransport, group: &str, name: &str) -> Box<dyn Connections> {
    let own =
        usize::from(transport.endpoint.address() != transport.endpoint.addresses.get().unwrap()[0]);
    transport.connect(group, name, &[0, 1], own).map_err(|down| down.how).unwrap()
}

/// Progresses until nothing is due.
fn finish(connections: &mut Box<dyn Connections>, peer: usize) -> Result<(), DisconnectReason> {
    let begin = Instant::now();
    while !connections.is_idle(peer) {
        connections.progress(Duration::from_millis(100)).map_err(|down| down.how)?;
        assert!(begin.elapsed() < TEST_TIMEOUT, "nothing comes");
    }
    Ok(())
}

fn segment(data: &mut [u8]) -> IoSegment {
    // SAFETY: the tests finish, or abort, before they drop or touch the data.
    unsafe { IoSegment::new(data.as_mut_ptr(), data.len()) }
}

fn pattern(seed: usize, size: usize) -> Vec<u8> {
    (0..size).map(|index| (index * 7 + index / 251 + seed) as u8).collect()
}

fn send(connections: &mut Box<dyn Connections>, to: usize, data: &mut [u8]) {
    connections.send(to, segment(data));
    finish(connections, to).unwrap();
}

fn receive(connections: &mut Box<dyn Connections>, from: usize, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    connections.receive(from, segment(&mut data));
    finish(connections, from).unwrap();
    data
}

/// Waits until the peer is known to have gone.
fn reason(connections: &mut Box<dyn Connections>, peer: usize) -> DisconnectReason {
    let mut byte = [0];
    connections.receive(peer, segment(&mut byte));
    let how = finish(connections, peer).unwrap_err();
    connections.abort("");
    how
}

#[test]
fn who_refuses_a_connection_may_be_behind_a_firewall() {
    let [one, two] = pair();
    let gone = two.endpoint.address();
    drop(two);
    let DisconnectReason::Refused(why) = reason(&mut channel(&one, "a"), 1) else {
        panic!("it must be out of reach")
    };
    assert!(why.contains(&format!("{gone} refuses the connection")), "{why}");
}

#[test]
fn channels_share_a_connection_in_both_directions_at_once() {
    let transports = pair();
    thread::scope(|scope| {
        for (own, transport) in transports.iter().enumerate() {
            for name in 0..3 {
                scope.spawn(move || {
                    let mut connections = channel(transport, &format!("channel {name}"));
                    let peer = 1 - own;
                    let mut output = pattern(10 * own + name, LARGE);
                    for piece in output.chunks_mut((1 << 20) + 7) {
                        connections.send(peer, segment(piece));
                    }
                    let mut input = vec![0; LARGE];
                    for piece in input.chunks_mut(300_001) {
                        connections.receive(peer, segment(piece));
                    }
                    finish(&mut connections, peer).unwrap();
                    assert!(input == pattern(10 * peer + name, LARGE), "channel {name}");
                });
            }
        }
    });
}

/// Its bytes come first, more than are kept; in between those of another channel.
#[test]
fn a_channel_that_nobody_receives_in_blocks_no_other() {
    let [one, two] = pair();
    thread::scope(|scope| {
        let mut late = channel(&one, "late");
        let sender = scope.spawn(move || send(&mut late, 1, &mut pattern(1, LARGE)));
        let (mut other, mut other_end) = (channel(&one, "other"), channel(&two, "other"));
        for round in 0..20 {
            thread::sleep(Duration::from_millis(5));
            let mut message = pattern(round, 100_000);
            let sent = scope.spawn(move || {
                send(&mut other, 1, &mut message);
                other
            });
            assert!(receive(&mut other_end, 0, 100_000) == pattern(round, 100_000));
            other = sent.join().unwrap();
        }
        assert!(!sender.is_finished(), "the receiver keeps no more than a window");
        assert!(receive(&mut channel(&two, "late"), 0, LARGE) == pattern(1, LARGE));
        sender.join().unwrap();
    });
}

/// The limit comes in the header of a message that the blocked sender does not expect.
#[test]
fn a_sender_without_credit_reads_headers() {
    let [one, two] = pair();
    let (mut first, mut second) = (channel(&one, "a"), channel(&two, "a"));
    let (mut input, mut output) = (vec![0; 2 * LARGE], [7]);
    first.receive(1, segment(&mut input));
    first.send(1, segment(&mut output));
    thread::scope(|scope| {
        let receiver = scope.spawn(|| finish(&mut first, 1).unwrap());
        send(&mut second, 0, &mut pattern(4, 2 * LARGE));
        receiver.join().unwrap();
    });
    assert_eq!(receive(&mut second, 0, 1), [7]);
    assert!(input == pattern(4, 2 * LARGE));
}

/// What a thread reads is not always the frames that it guesses: they are of other sizes, or of
/// another channel.
#[test]
fn segments_that_differ_from_those_sent_get_the_same_bytes() {
    let [one, two] = pair();
    let total = 3_000_000;
    thread::scope(|scope| {
        for (name, sent, received) in
            [("a", 5_000, 70_000), ("b", 70_000, 5_000), ("c", 100, 4_097), ("d", 1 << 21, 64)]
        {
            let (mut first, mut second) = (channel(&one, name), channel(&two, name));
            scope.spawn(move || {
                let mut output = pattern(sent, total);
                for piece in output.chunks_mut(sent) {
                    first.send(1, segment(piece));
                }
                finish(&mut first, 1).unwrap();
            });
            scope.spawn(move || {
                let mut input = vec![0; total];
                for pieces in input.chunks_mut(10 * received) {
                    for piece in pieces.chunks_mut(received) {
                        second.receive(0, segment(piece));
                    }
                    finish(&mut second, 0).unwrap();
                }
                assert!(input == pattern(sent, total), "channel {name}");
            });
        }
    });
}

#[test]
fn small_messages_keep_their_order() {
    let [one, two] = pair();
    let (mut first, mut second) = (channel(&one, "a"), channel(&two, "a"));
    for round in 0..2000_usize {
        send(&mut first, 1, &mut pattern(round, round % 60 + 1));
        if round % 3 == 2 {
            for round in round - 2..=round {
                let size = round % 60 + 1;
                assert_eq!(receive(&mut second, 0, size), pattern(round, size));
            }
        }
    }
}

#[test]
fn a_channel_that_was_left_before_anybody_connected_says_so() {
    let [one, two] = pair();
    let mut left = channel(&two, "left");
    left.shutdown();
    drop(left);
    let mut failed = channel(&two, "failed");
    failed.abort("why it failed");
    drop(failed);
    assert!(matches!(reason(&mut channel(&one, "left"), 1), DisconnectReason::Left));
    let how = reason(&mut channel(&one, "failed"), 1);
    assert!(matches!(&how, DisconnectReason::Failed(why) if why == "why it failed"), "{how:?}");
    // And while they are connected, to one that waits already.
    let (mut waiting, mut failing) = (channel(&one, "later"), channel(&two, "later"));
    thread::scope(|scope| {
        let waiter = scope.spawn(|| reason(&mut waiting, 1));
        thread::sleep(Duration::from_millis(50));
        failing.abort("also why");
        let how = waiter.join().unwrap();
        assert!(matches!(&how, DisconnectReason::Failed(why) if why == "also why"), "{how:?}");
    });
}

#[test]
fn what_was_sent_comes_before_the_end() {
    let [one, two] = pair();
    let (mut first, mut second) = (channel(&one, "a"), channel(&two, "a"));
    // Nobody reads this: a socket that is closed with unread bytes loses what it has not sent.
    send(&mut channel(&two, "unread"), 0, &mut [0; 100]);
    send(&mut first, 1, &mut pattern(3, 1 << 20));
    first.shutdown();
    drop((first, one));
    thread::sleep(Duration::from_millis(50));
    assert!(receive(&mut second, 0, 1 << 20) == pattern(3, 1 << 20));
    assert!(matches!(reason(&mut second, 0), DisconnectReason::Left));
    // Of a channel that the peer has never used.
    assert!(matches!(reason(&mut channel(&two, "b"), 0), DisconnectReason::Ended));
}

/// It ends in the middle of a frame, whose rest must not be taken for the next.
#[test]
fn an_aborted_channel_leaves_the_others_intact() {
    let [one, two] = pair();
    let mut data = pattern(5, LARGE);
    let mut aborted = channel(&one, "aborted");
    aborted.send(1, segment(&mut data));
    let begin = Instant::now();
    // Nobody receives: the kernel's buffers are full in the middle of a frame.
    while begin.elapsed() < Duration::from_millis(300) {
        aborted.progress(Duration::from_millis(10)).map_err(|down| down.how).unwrap();
    }
    aborted.abort("in the middle");
    drop((aborted, data));
    thread::scope(|scope| {
        scope.spawn(|| send(&mut channel(&one, "b"), 1, &mut pattern(6, LARGE)));
        assert!(receive(&mut channel(&two, "b"), 0, LARGE) == pattern(6, LARGE));
    });
    // What has come of it is right.
    let (mut input, mut connections) = (vec![0; LARGE], channel(&two, "aborted"));
    connections.receive(0, segment(&mut input));
    let how = finish(&mut connections, 0).unwrap_err();
    assert!(matches!(&how, DisconnectReason::Failed(why) if why == "in the middle"), "{how:?}");
    connections.abort("");
}

#[test]
fn who_connects_at_once_has_one_connection() {
    for _ in 0..50 {
        let transports = pair();
        thread::scope(|scope| {
            for (own, transport) in transports.iter().enumerate() {
                scope.spawn(move || {
                    let (mut connections, mut data) = (channel(transport, "a"), pattern(own, 1000));
                    connections.send(1 - own, segment(&mut data));
                    finish(&mut connections, 1 - own).unwrap();
                    assert_eq!(receive(&mut connections, 1 - own, 1000), pattern(1 - own, 1000));
                });
            }
        });
    }
}

#[test]
fn who_has_left_a_group_says_so_in_channels_that_it_has_never_used() {
    let [one, two] = pair();
    let groups = ["left before anybody connected", "left later", "never joined"];
    two.join_group(groups[0]);
    two.join_group(groups[1]);
    two.leave_group(groups[0]);
    let left = |how| matches!(how, DisconnectReason::Left);
    assert!(left(reason(&mut channel_of(&one, groups[0], "a"), 1)));
    assert!(left(reason(&mut channel_of(&one, groups[2], "c"), 1)));
    thread::scope(|scope| {
        let receiver = scope.spawn(|| reason(&mut channel_of(&one, groups[1], "b"), 1));
        // The receiver takes no more than a window.
        let sender = scope.spawn(|| {
            let (mut data, mut connections) = (pattern(1, LARGE), channel_of(&one, groups[1], "d"));
            connections.send(1, segment(&mut data));
            let how = finish(&mut connections, 1).unwrap_err();
            connections.abort("");
            how
        });
        thread::sleep(Duration::from_millis(100));
        assert!(!receiver.is_finished() && !sender.is_finished());
        two.leave_group(groups[1]);
        assert!(left(receiver.join().unwrap()) && left(sender.join().unwrap()));
    });
}

/// Whether or not both sides have used them, and have received all.
#[test]
fn nothing_is_kept_of_the_channels_of_a_group_that_both_have_left() {
    let transports = pair();
    let [one, two] = &transports;
    let (mut first, mut second) = (channel(one, "lasting"), channel(two, "lasting"));
    for round in 0..30 {
        let group = format!("group {round}");
        transports.iter().for_each(|transport| transport.join_group(&group));
        let name = |name: &str| format!("{name} {round}");
        send(&mut channel_of(one, &group, &name("not received")), 1, &mut pattern(1, 1 << 20));
        drop(channel_of(two, &group, &name("not used")));
        // The message is read before anybody has left, after one has, or after both.
        let early = round % 3;
        [two, one][..early].iter().for_each(|transport| transport.leave_group(&group));
        if early == 2 {
            thread::sleep(Duration::from_millis(20));
        }
        send(&mut first, 1, &mut [0; 100]);
        receive(&mut second, 0, 100);
        transports.iter().for_each(|transport| transport.leave_group(&group));
    }
    let begin = Instant::now();
    let counts = || [one.endpoint.pair(1).channel_count(), two.endpoint.pair(0).channel_count()];
    while counts() != [1, 1] {
        assert!(begin.elapsed() < TEST_TIMEOUT, "{:?} channels", counts());
        thread::sleep(Duration::from_millis(1));
    }
}

/// Nor is anything left of the attempt when the transport is dropped.
#[test]
fn who_does_not_answer_delays_no_other_connection() {
    let deaf = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::net::listen(&deaf, 0).unwrap();
    let address = deaf.local_addr().unwrap();
    // Until there is no room for those that nobody accepts.
    let connect = || TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok();
    let _guests: Vec<_> = std::iter::from_fn(connect).collect();
    let transports = transports_at(3, |rank| (rank == 1).then_some(address));
    let [one, _, three] = &transports[..] else { unreachable!() };
    let mut unanswered = one.connect(GROUP, "a", &[0, 1], 0).map_err(|down| down.how).unwrap();
    assert!(unanswered.disconnect_reason(1).is_none());
    let mut first = one.connect(GROUP, "b", &[0, 2], 0).map_err(|down| down.how).unwrap();
    let mut second = three.connect(GROUP, "b", &[0, 2], 1).map_err(|down| down.how).unwrap();
    send(&mut first, 1, &mut pattern(1, 1000));
    assert!(receive(&mut second, 0, 1000) == pattern(1, 1000));
    assert!(matches!(one.endpoint.pair(1).state, pair::PairState::Connecting));
    drop((first, second));
    let endpoint = Arc::clone(&one.endpoint);
    drop(transports);
    // The unanswered channel has one, and this test.
    assert_eq!(Arc::strong_count(&endpoint), 2, "somebody still connects");
    drop(unanswered);
}
