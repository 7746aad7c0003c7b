"""Ends a program with one line where Python has no PyTorch. Programs import this before PyTorch."""

import importlib.util
import os
import sys

if importlib.util.find_spec("torch") is None:
    name = os.path.basename(sys.argv[0])
    sys.exit(f"{name}: error: {sys.executable} has no PyTorch: start it with one that has; scripts/setup --pytorch makes .pytorch/bin/python3")
