//! Prompts of workers, and what is typed at them.

use flow_harness::cli::{launcher, until};
use flow_harness::python::{have, startup};

use std::fs;
use std::process::Command;

use rustix::termios::{LocalModes, tcgetattr};

use super::{FLOW_LAUNCH, Terminal, python};

/// On the stream of the prompt: at the prompt, of which another rank's line may have come between.
#[test]
fn what_follows_an_answered_prompt_is_shown_at_it() {
    let text = "[ $RANK = 0 ] || { until [ -e $0 ]; do sleep 0.02; done; echo working; exit; }
                printf 'name? '; read name; touch $0; read again; echo hello $name $again; echo bye";
    let folder = tempfile::tempdir().unwrap();
    let gate = folder.path().join("gate");
    let mut command = launcher(&["--stdin", "0", "--nproc_per_node", "2", "sh", "-c", text]);
    let Some(mut terminal) = Terminal::start(command.arg(&gate)) else { return };
    terminal.until_it_shows("[rank 0] name? ");
    terminal.types("Ann\n");
    terminal.until_it_shows("[rank 1] working\r\n[rank 0] name? ");
    terminal.types("Lee\n");
    let (code, shown) = terminal.end();
    let end = "[rank 1] working\r\n[rank 0] name? Lee\r\nhello Ann Lee\r\n[rank 0] bye\r\n";
    assert!(code == Some(0) && shown.ends_with(end), "{shown:?}");
}

#[test]
fn input_is_asked_for_and_typed() {
    let folder = tempfile::tempdir().unwrap();
    let program = python(&folder, "print('hello', input('name? '))");
    let Some(mut terminal) = Terminal::start(&launcher(&[&program])) else { return };
    terminal.until_it_shows("[rank 0] name? ");
    terminal.types("Ann\n");
    terminal.until_it_shows("hello Ann\r\n");
    assert_eq!(terminal.end().0, Some(0));
}

/// Python asks on standard error and goes on on standard output.
#[test]
fn a_prompt_that_was_answered_is_over() {
    let text =
        "[ $RANK = 0 ] && { printf 'name? ' >&2; read name; echo hello $name; touch $0; sleep 1.5; echo end; exit; }
                until [ -e $0 ]; do sleep 0.02; done; echo ready; printf 'age? '; read age; echo $age";
    let folder = tempfile::tempdir().unwrap();
    let gate = folder.path().join("gate");
    for (tail, term) in [("", "xterm"), ("", "dumb"), (" 2>&1 | cat", "xterm")] {
        let launch =
            format!("TERM={term} $0 --stdin all --prefix --nproc_per_node 2 sh -c \"$1\" $2{tail}");
        let mut command = Command::new("env");
        command.args([
            "--default-signal",
            "sh",
            "-c",
            &launch,
            FLOW_LAUNCH,
            text,
            gate.to_str().unwrap(),
        ]);
        let Some(mut terminal) = Terminal::start(&command) else { return };
        terminal.until_it_shows("[rank 0] name? ");
        terminal.types("Ann\n");
        terminal.until_it_shows("[rank 0] hello Ann\r\n");
        terminal.until_it_shows("[rank 1] age? ");
        terminal.types("7\n");
        let (_, shown) = terminal.end();
        assert_eq!(shown.matches("name? ").count(), 1, "{shown:?}");
        fs::remove_file(&gate).unwrap();
    }
}

/// Whoever never answers rank 0 sees all the same what rank 1 asks.
#[test]
fn a_prompt_waits_only_a_moment_for_anothers() {
    let text = "[ $RANK = 0 ] && { printf 'name? '; exec sleep 1000; }; sleep 0.5; printf 'age? \
                '; exec sleep 1000";
    for tail in ["", " 2>&1 | cat"] {
        let launch = format!("$0 --stdin all --prefix --nproc_per_node 2 sh -c \"$1\"{tail}");
        let mut command = Command::new("env");
        command.args(["--default-signal", "sh", "-c", &launch, FLOW_LAUNCH, text]);
        let Some(mut terminal) = Terminal::start(&command) else { return };
        terminal.until_it_shows("[rank 1] age? ");
        terminal.until_it_shows("[rank 0] name? ");
        terminal.types("\x03");
        terminal.end();
    }
}

#[test]
fn pdb_takes_commands() {
    let folder = tempfile::tempdir().unwrap();
    let text =
        "import os\nx = 41\nif os.environ['RANK'] == '0':\n    breakpoint()\n    print('x is', x)";
    let Some(mut terminal) =
        Terminal::start(&launcher(&["--nproc_per_node", "2", &python(&folder, text)]))
    else {
        return;
    };
    terminal.until_it_shows("(Pdb) ");
    terminal.types("x + 100\n");
    terminal.until_it_shows("141\r\n");
    terminal.types("x = 42\n");
    terminal.types("c\n");
    terminal.until_it_shows("x is 42\r\n");
    assert_eq!(terminal.end().0, Some(0));
}

#[test]
fn pytorchs_breakpoint_works() {
    let folder = tempfile::tempdir().unwrap();
    if !have("torch") {
        return;
    }
    let text = "import torch.distributed as dist\ndist.init_process_group('gloo')\nx = \
                dist.get_rank() + 41\n\
                dist.breakpoint(0)\nprint('x is', x)\ndist.destroy_process_group()";
    let mut command = launcher(&["--nproc_per_node", "2", &python(&folder, text)]);
    command.env("PYTHON_EXEC", flow_harness::python::python()).env("PYTHONPATH", startup());
    let Some(mut terminal) = Terminal::start(&command) else { return };
    terminal.until_it_shows("(Pdb) ");
    terminal.types("up\n");
    terminal.until_it_shows("program.py(4)");
    terminal.types("x += 100\n");
    terminal.types("c\n");
    terminal.until_it_shows("x is 141\r\n");
    terminal.until_it_shows("x is 42\r\n");
    assert_eq!(terminal.end().0, Some(0));
}

#[test]
fn a_password_is_not_shown() {
    let folder = tempfile::tempdir().unwrap();
    // One write: its pieces could come between those of the prompt, which is on stderr.
    let text = "import getpass, os\nif os.environ['RANK'] == '0':\n  \
                os.write(1, b'%d letters\\n' % len(getpass.getpass()))";
    let program = python(&folder, text);
    let Some(mut terminal) =
        Terminal::start(&launcher(&["--stdin", "0", "--nproc_per_node", "2", &program]))
    else {
        return;
    };
    terminal.until_it_shows("[rank 0] Password: ");
    until("the echo is off", || !terminal.echoes());
    terminal.types("sesame\n");
    terminal.until_it_shows("6 letters\r\n");
    let keyboard = terminal.keyboard.try_clone().unwrap();
    let (_, shown) = terminal.end();
    assert!(!shown.contains("sesame"), "{shown:?}");
    assert!(tcgetattr(&keyboard).unwrap().local_modes.contains(LocalModes::ECHO));
}
