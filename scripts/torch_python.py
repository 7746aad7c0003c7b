"""Finds a Python with PyTorch for scripts that need one: that of PYTHON, this one, or that of .pytorch, which scripts/setup makes."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"


def find():
    given = shutil.which(os.environ.get("PYTHON", ""))
    if given and subprocess.run([given, "-c", HAS_TORCH]).returncode == 0:
        return given
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    own = ROOT / ".pytorch" / "bin" / "python3"
    set_up("--pytorch", own)
    return str(own)


def restart():
    """Has such a Python run this script, if this one is none."""
    if importlib.util.find_spec("torch") is None:
        python = find()
        os.execv(python, [python, *sys.argv])


def set_up(option, made):
    """Has scripts/setup get what is not there yet."""
    if not made.exists():
        subprocess.run([ROOT / "scripts" / "setup", option])
    if not made.exists():
        name = os.path.basename(sys.argv[0])
        sys.exit(f"{name}: error: scripts/setup {option} could not make {made}: see above, or set PYTHON to a Python with PyTorch")
