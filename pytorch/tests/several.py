"""Runs programs one after the other, each in a child of this process, which has imported PyTorch for all of them.

usage: several.py FOLDER [NAME=VALUE]... PROGRAM [ARGUMENT]... [-- [NAME=VALUE]... PROGRAM [ARGUMENT]...]...

A program lies in this folder, or has its whole path as its name. What the program of number N, from 0 on, prints on rank R is in
FOLDER/N.R.out and FOLDER/N.R.err. The first that fails is the last.
"""

import ctypes
import gc
import os
import signal
import sys
from pathlib import Path

# What is imported lives until the end: no collector looks at it, here or in a child.
gc.disable()
import torch._dynamo  # by the first optimizer otherwise, in each child
import torch.distributed as dist

gc.freeze()
gc.enable()

PR_SET_PDEATHSIG = 1
FOLDER, RANK = sys.argv[1], os.environ["RANK"]


def programs():
    program = []
    for word in [*sys.argv[2:], "--"]:
        if word != "--":
            program.append(word)
            continue
        yield program
        program = []


def become(number, words):
    """A process that ends with its parent and prints to files, with the variables and arguments of a program. Returns its path."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for descriptor, name in (1, "out"), (2, "err"):
        os.dup2(os.open(f"{FOLDER}/{number}.{RANK}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    # The launcher's store for PyTorch has the keys of earlier programs.
    rendezvous = sys.modules["torch.distributed.rendezvous"]
    create = rendezvous._create_c10d_store
    rendezvous._create_c10d_store = lambda *place: dist.PrefixStore(f"program {number}", create(*place))
    while "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        os.environ[name] = value
    path = Path(__file__).parent / words[0]
    sys.argv = [str(path), *words[1:]]
    sys.path[0] = str(path.parent)
    return sys.argv[0]


for number, words in enumerate(programs()):
    child = os.fork()
    if not child:
        break
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(code if code > 0 else 128 - code)
else:
    sys.exit()

# The child goes on here, as if this file were the program's.
__file__ = become(number, words)
exec(compile(Path(__file__).read_text(), __file__, "exec"))
