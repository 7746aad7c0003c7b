"""Makes programs that start their jobs by PyTorch's launcher start them by flow-launch, without a change to them.

    python -m flow_launch.patch accelerate launch train.py
    python -m flow_launch.patch -m package.module arguments

Or call `patch()` first in a program or notebook.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import sysconfig

from .api import launch_agent


def patch():
    """Makes `torch.distributed.run` and `elastic_launch` start jobs by flow-launch, from now on, in this process."""
    import torch.distributed.launcher as launcher
    import torch.distributed.launcher.api as api

    # All of PyTorch's ways lead to this function, also for who has imported them already.
    launcher.launch_agent = api.launch_agent = launch_agent


def main(args: list[str]):
    """Runs a Python command, script or module in this process, with PyTorch's launcher replaced."""
    if args[:1] == ["-m"] and len(args) > 1:
        patch()
        sys.argv = args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        return
    if not args or args[0].startswith("-"):
        sys.exit("usage: python -m flow_launch.patch COMMAND|SCRIPT|-m MODULE [ARGUMENTS...]")
    program = args[0] if os.path.isfile(args[0]) else _command(args[0])
    if program is None:
        sys.exit(f"flow_launch.patch: no command {args[0]}: it must be a script, or a Python command that is on PATH")
    patch()
    sys.argv = [program, *args[1:]]
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    runpy.run_path(program, run_name="__main__")


def _command(name: str) -> str | None:
    return shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)


if __name__ == "__main__":
    main(sys.argv[1:])
