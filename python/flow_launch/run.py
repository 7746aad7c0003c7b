"""`python -m flow_launch.run` takes the command line of `python -m torch.distributed.run`.

Workers run in this Python, where the command flow-launch takes `python3` from PATH. Also for programs that call
`torch.distributed.run.main(arguments)`, or `run` with what torch's parser has made of them.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace

from . import job

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

# What stands in a parsed command line for "not given".
DEFAULTS = {"master_addr": "127.0.0.1", "master_port": 29500}


def main(args: list[str] | None = None):
    """Runs a job by its command line. Raises `ChildFailedError` where a worker fails."""
    args = sys.argv[1:] if args is None else args
    job.run(args, "flow-launch", SIGNALS, {})


def run(args: Namespace):
    """The same for a command line that torch's parser has read."""
    signals = getattr(args, "signals_to_handle", SIGNALS)
    job.run(command_line(args), args.training_script, signals, {})


def command_line(args: Namespace) -> list[str]:
    """The command line that gives these arguments."""
    options = dict(vars(args))
    program = [options.pop("training_script"), *options.pop("training_script_args")]
    line = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            line.append(flag)
        elif isinstance(value, list) and value:
            line.append(f"{flag}=" + ",".join(text.replace(",", ",,") for text in value))
        elif value and value != DEFAULTS.get(name):
            line.append(f"{flag}={value}")
    return line + program


if __name__ == "__main__":
    os.environ.setdefault("PYTHON_EXEC", sys.executable)
    try:
        launcher = job.launcher()
    except FileNotFoundError as error:
        sys.exit(f"flow_launch.run: {error}")
    os.execv(launcher, [launcher, *sys.argv[1:]])
