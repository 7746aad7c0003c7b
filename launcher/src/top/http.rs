//! The page over HTTP. Whoever asks must know the token in the address that is printed at the start.
//!
//! The job is looked at in one thread. Each connection has another, which answers with what was seen last.

use std::io::{self, ErrorKind, Read, Write, stdout};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use flow_store::net::secret;
use rustix::system::uname;

use crate::net;
use crate::signal;
use crate::top::table::{self, Before};
use crate::top::view::View;
use crate::top::watcher::{INTERVAL, Watcher};

const PAGE: &str = include_str!("page.html");

/// The most lines of a page, and the longest one.
const ROWS: usize = 10_000;
const COLUMNS: usize = 400;

/// The time between two looks while nobody asks: the end of the job is noticed then.
const IDLE_INTERVAL: Duration = Duration::from_secs(5);

/// The time to read a request, and to send an answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The most bytes of a request, its headers, and connections at a time.
const REQUEST: usize = 8192;
const HEADERS: usize = 64;
const CONNECTIONS: usize = 32;

/// Serves the page at an address until the job is over; returns the exit code.
pub fn serve(mut watcher: Watcher, host: &str, port: u16) -> anyhow::Result<u8> {
    let address = net::join(host, port);
    let listener = TcpListener::bind(&address);
    let listener = listener.with_context(|| format!("cannot serve a page at {address}"))?;
    let token = secret()?;
    let line = format!("http://{}/?token={token}\n", reachable(listener.local_addr()?));
    let seen = Arc::new(Seen::default());
    let server = Server { token, seen: Arc::clone(&seen), connections: AtomicUsize::new(0) };
    let thread = thread::Builder::new().name("flow-top-http".into());
    // Signals are for this thread.
    signal::with_all_blocked(|| thread.spawn(move || Arc::new(server).accept(&listener)))??;
    match stdout().write_all(line.as_bytes()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(0),
        written => written?,
    }
    let mut before = Before::default();
    while let Some(status) = watcher.look()? {
        let view = View::of(&status);
        let shares = before.cpu_shares(&view);
        let text = table::lines(&view, &shares, ROWS, COLUMNS, "").join("\n");
        seen.show(text, serde_json::to_string(&view)?);
    }
    Ok(0)
}

/// Returns the address as a browser asks for it.
fn reachable(address: SocketAddr) -> String {
    if address.ip().is_unspecified() {
        return net::join(&uname().nodename().to_string_lossy(), address.port());
    }
    address.to_string()
}

/// What was seen of the job.
#[derive(Default)]
struct Seen {
    last: Mutex<Last>,
    changed: Condvar,
}

#[derive(Default)]
struct Last {
    /// The text, the JSON, and the time of the look.
    shown: Option<(String, String, Instant)>,
    /// When somebody has asked.
    asked: Option<Instant>,
}

impl Seen {
    fn lock(&self) -> MutexGuard<'_, Last> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows what a look has seen, and returns when it is time for the next one.
    fn show(&self, text: String, json: String) {
        let looked = Instant::now();
        let mut last = self.lock();
        last.shown = Some((text, json, looked));
        self.changed.notify_all();
        loop {
            let is_asked = last.asked.is_some_and(|asked| asked > looked);
            let interval = if is_asked { INTERVAL } else { IDLE_INTERVAL };
            let left = interval.saturating_sub(looked.elapsed());
            if left.is_zero() {
                return;
            }
            let waited = self.changed.wait_timeout(last, left);
            last = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns the text and the JSON of a look that is not old, or an error in one line.
    fn ask(&self) -> Result<(String, String), String> {
        let asked = Instant::now();
        let mut last = self.lock();
        last.asked = Some(asked);
        self.changed.notify_all();
        loop {
            let age = last.shown.as_ref().map(|(_, _, looked)| looked.elapsed());
            if let (Some((text, json, _)), Some(age)) = (&last.shown, age)
                && age < 2 * INTERVAL
            {
                return Ok((text.clone(), json.clone()));
            }
            let left = TIMEOUT.saturating_sub(asked.elapsed());
            if left.is_zero() {
                let since = age.map_or("ever".into(), |age| format!("for {} s", age.as_secs()));
                return Err(format!("the leading node has not answered {since}\n"));
            }
            let waited = self.changed.wait_timeout(last, left);
            last = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

struct Server {
    token: String,
    seen: Arc<Seen>,
    connections: AtomicUsize,
}

/// A connection that is counted.
struct Connection(Arc<Server>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Server {
    fn accept(self: Arc<Self>, listener: &TcpListener) {
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                // There are too few descriptors.
                thread::sleep(INTERVAL);
                continue;
            };
            let number = self.connections.fetch_add(1, Ordering::SeqCst);
            let connection = Connection(Arc::clone(&self));
            if number >= CONNECTIONS {
                continue;
            }
            let answer = move || {
                if let Err(error) = connection.0.answer(stream) {
                    log::debug!("a browser: {error}");
                }
            };
            if thread::Builder::new().name("flow-top-browser".into()).spawn(answer).is_err() {
                thread::sleep(INTERVAL);
            }
        }
    }

    /// Reads a request, and answers it.
    fn answer(&self, mut stream: TcpStream) -> io::Result<()> {
        stream.set_write_timeout(Some(TIMEOUT))?;
        let (code, kind, text) = match read_path(&mut stream)? {
            None => ("400 Bad Request", "text/plain", "there are GET requests only\n".into()),
            Some(url) => self.page(&url),
        };
        let head = format!(
            "HTTP/1.1 {code}\r\nContent-Type: {kind}; charset=utf-8\r\nContent-Length: {}\r\n\
             Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\n\
             X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n",
            text.len()
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(text.as_bytes())
    }

    /// Returns the status, the type and the text of an answer.
    fn page(&self, url: &str) -> (&'static str, &'static str, String) {
        let (path, query) = url.split_once('?').unwrap_or((url, ""));
        let token = query.strip_prefix("token=").unwrap_or_default();
        if !is_equal(token.as_bytes(), self.token.as_bytes()) {
            let text = "open the address that flow-launch top has printed\n";
            return ("403 Forbidden", "text/plain", text.into());
        }
        match path {
            "/" => ("200 OK", "text/html", PAGE.into()),
            "/top.txt" | "/top.json" => match self.seen.ask() {
                Ok((text, _)) if path == "/top.txt" => ("200 OK", "text/plain", text),
                Ok((_, json)) => ("200 OK", "application/json", json),
                Err(error) => ("503 Service Unavailable", "text/plain", error),
            },
            _ => ("404 Not Found", "text/plain", "there are /, /top.txt and /top.json\n".into()),
        }
    }
}

/// Compares in a time that does not tell where the two differ.
fn is_equal(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len() && one.iter().zip(other).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

/// Reads a request; returns the path and the query of a GET.
fn read_path(stream: &mut TcpStream) -> io::Result<Option<String>> {
    let deadline = Instant::now() + TIMEOUT;
    let mut bytes = [0; REQUEST];
    let mut length = 0;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        let count = stream.read(&mut bytes[length..])?;
        if count == 0 || left.is_zero() {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        length += count;
        let mut headers = [httparse::EMPTY_HEADER; HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        match request.parse(&bytes[..length]) {
            Ok(httparse::Status::Partial) => {}
            Ok(httparse::Status::Complete(_)) if request.method == Some("GET") => {
                return Ok(request.path.map(String::from));
            }
            Ok(httparse::Status::Complete(_)) | Err(_) => return Ok(None),
        }
    }
}
