"""Runs flow-launch to its end, from a program that continues afterwards."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import threading

from . import errors

PR_SET_PDEATHSIG = 1


def launcher() -> str:
    """The flow-launch that was installed with this package, else the one on PATH."""
    packages = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # Of this Python or environment, of `pip install --user`, of `pip install --target`; of whatever else.
    folders = [sysconfig.get_path("scripts"), os.path.join(site.getuserbase(), "bin"), os.path.join(packages, "bin")]
    for folder in [*folders, None]:
        found = shutil.which("flow-launch", path=folder)
        if found:
            return found
    raise FileNotFoundError("flow-launch is neither installed beside this Python nor on PATH; install its wheel")


def path(file) -> str:
    """The path by which other processes open a temporary file. It has no name, so a kill leaves nothing behind."""
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def run(arguments: list[str], name: str, signals: str, environment: dict[str, str]) -> list[int]:
    """Returns the ranks of this node's workers, once all have ended well.

    Raises `ChildFailedError` if a worker fails, `SignalException` if one of `signals` (names, separated by commas) ends the
    job, and `CalledProcessError` if flow-launch refuses the command line, with a line on stderr. With `--hosts` a worker
    that fails is a `CalledProcessError` too, because the agents report it to the user only.
    """
    with tempfile.TemporaryFile() as happened:
        recorded = tempfile.TemporaryFile()
        environment = {**os.environ, **environment, "TORCHELASTIC_ERROR_FILE": path(recorded)}
        environment["FLOW_LAUNCHER_EVENTS"] = path(happened)
        environment.setdefault("PYTHON_EXEC", sys.executable)
        command = [launcher(), *arguments]
        on_terminal = _is_on_terminal()
        with _Signals(signals, on_terminal) as caught:
            child = subprocess.Popen(command, env=environment, preexec_fn=_bound_to_parent(not on_terminal))
            caught.pass_to(child)
            try:
                code = child.wait()
            finally:
                if child.returncode is None:
                    child.terminate()
                    child.wait()
        happened.seek(0)
        events = [json.loads(line) for line in happened]
    attempt = max((event["restart_count"] for event in events), default=0)
    events = [event for event in events if event["restart_count"] == attempt]
    if code != 0 and caught.first is None:
        error = errors.child_failed(name, events, path(recorded)) or subprocess.CalledProcessError(code, command)
        error._recorded = recorded  # kept, for PyTorch's @record reads it when the error passes by
        try:
            raise error
        finally:
            del error  # whose traceback has this frame: files are closed without the garbage collector
    recorded.close()
    if code != 0:
        message = f"Process {os.getpid()} got signal: {caught.first.value}"
        raise errors.class_named("SignalException")(message, caught.first)
    return [event["rank"] for event in events if event["event"] == "start"]


def _is_on_terminal() -> bool:
    """Whether a terminal's Ctrl-C reaches us, and so children in our process group."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _bound_to_parent(own_group: bool):
    """Runs in the child before it becomes flow-launch: it gets SIGTERM if this process is killed."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def bind():
        if own_group:
            os.setpgid(0, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return bind


class _Signals:
    """Passes signals on to flow-launch while it runs, but those that a terminal sends it as well.

    Python takes signals in its main thread only: a job that another one starts gets none.
    """

    CANNOT_BE_CAUGHT = {signal.SIGKILL, signal.SIGSTOP}
    FROM_TERMINAL = {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP}

    def __init__(self, names: str, on_terminal: bool):
        in_main_thread = threading.current_thread() is threading.main_thread()
        names = (name.strip().upper() for name in names.split(",") if in_main_thread)
        numbers = {signal.Signals[name] for name in names if name in signal.Signals.__members__}
        self.signals = numbers - self.CANNOT_BE_CAUGHT
        self.on_terminal = on_terminal
        self.first = self.child = None

    def __enter__(self):
        self.before = {}
        try:
            for number in self.signals:
                self.before[number] = signal.signal(number, self.handle)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def pass_to(self, child):
        # Each signal once: a second Ctrl-C is an order to kill.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        self.child = child
        if self.first is not None:
            child.send_signal(self.first)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def handle(self, number, _frame):
        number = signal.Signals(number)
        self.first = self.first or number
        if self.child is not None and not (self.on_terminal and number in self.FROM_TERMINAL):
            self.child.send_signal(number)
