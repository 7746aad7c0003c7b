//! The terminal on which a job is shown.

use std::io::{self, Read, Write, stdin, stdout};
use std::os::fd::AsFd;

use anyhow::Context;
use rustix::process::Signal;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use crate::poll::{readable, ready};
use crate::signal::{self, SignalReader};
use crate::top::table::{self, Before};
use crate::top::view::View;
use crate::top::watcher::{self, Watcher};

/// The alternate screen, without a cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// Moves to the first line.
const HOME: &str = "\x1b[H";
/// Erases the rest of the line, and of the screen.
const END_OF_LINE: &str = "\x1b[K\r\n";
const END_OF_SCREEN: &str = "\x1b[J";

/// The signals that end this, or change the screen.
const SIGNALS: [Signal; 6] =
    [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::TSTP, Signal::WINCH];

/// A descriptor that is ready.
enum Ready {
    Key,
    Signal,
    Look,
}

/// Shows the job until it is over or the user wants to end.
pub fn show(watcher: Watcher) -> anyhow::Result<u8> {
    signal::block(&SIGNALS).context("cannot block signals")?;
    let signals = SignalReader::of(&SIGNALS).context("cannot open a signalfd")?;
    let (looks, woken) = watcher::watch(watcher)?;
    let keyboard = stdin();
    let mut screen = Screen::enter()?;
    let over = loop {
        let watched = vec![
            readable(Ready::Key, keyboard.as_fd()),
            readable(Ready::Signal, signals.as_fd()),
            readable(Ready::Look, woken.as_fd()),
        ];
        let mut ends = None;
        for event in ready(watched, None)? {
            match event {
                Ready::Key => ends = ends.or(read_key()?.then_some(None)),
                Ready::Signal => {
                    let arrived = signals.next()?;
                    let number = arrived.map(|arrival| arrival.number);
                    match number.and_then(Signal::from_named_raw) {
                        Some(Signal::WINCH) => screen.draw()?,
                        Some(Signal::TSTP) => screen = screen.suspend()?,
                        Some(_) => ends = Some(None),
                        None => {}
                    }
                }
                Ready::Look => {
                    let _ = (&woken).read(&mut [0]);
                    match looks.recv()?? {
                        Some(status) => screen.show(View::of(&status))?,
                        None => ends = Some(Some("the job is over")),
                    }
                }
            }
        }
        if let Some(why) = ends {
            break why;
        }
    };
    drop(screen);
    if let Some(why) = over {
        println!("flow-launch: {why}");
    }
    Ok(0)
}

/// Whether the user has typed q, or the terminal has gone.
fn read_key() -> io::Result<bool> {
    let mut keys = [0; 64];
    let count = stdin().read(&mut keys)?;
    Ok(count == 0 || keys[..count].contains(&b'q'))
}

/// The screen, which is as before when this is dropped.
struct Screen {
    modes: Termios,
    shown: Option<(View, Vec<Option<f64>>)>,
    before: Before,
    lines: Vec<String>,
}

impl Screen {
    fn enter() -> anyhow::Result<Screen> {
        let modes = tcgetattr(stdin()).context("cannot read the terminal's modes")?;
        let mut ours = modes.clone();
        // Keys come at once, and are not shown. Ctrl-C stays a signal.
        ours.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
        tcsetattr(stdin(), OptionalActions::Now, &ours)
            .context("cannot set the terminal's modes")?;
        let screen = Screen { modes, shown: None, before: Before::default(), lines: Vec::new() };
        write(ENTER)?;
        Ok(screen)
    }

    fn show(&mut self, view: View) -> io::Result<()> {
        let cpu_shares = self.before.cpu_shares(&view);
        self.shown = Some((view, cpu_shares));
        self.draw()
    }

    fn draw(&mut self) -> io::Result<()> {
        let Some((view, cpu_shares)) = &self.shown else { return Ok(()) };
        let size = tcgetwinsize(stdout())?;
        let (rows, columns) = (size.ws_row.into(), size.ws_col.into());
        self.lines = table::lines(view, cpu_shares, rows, columns, "; q ends this");
        let text = self.lines.join(END_OF_LINE);
        write(&format!("{HOME}{text}\x1b[K{END_OF_SCREEN}"))
    }

    /// Ctrl-Z: leaves the terminal to the shell until the user continues us.
    fn suspend(mut self) -> anyhow::Result<Screen> {
        let shown = self.shown.clone();
        let before = std::mem::take(&mut self.before);
        drop(self);
        signal::raise_once(Signal::TSTP)?;
        let mut screen = Screen::enter()?;
        (screen.shown, screen.before) = (shown, before);
        screen.draw()?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // It fails only where the terminal has gone.
        let _ = write(LEAVE);
        let _ = tcsetattr(stdin(), OptionalActions::Now, &self.modes);
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut terminal = stdout().lock();
    terminal.write_all(text.as_bytes())?;
    terminal.flush()
}
