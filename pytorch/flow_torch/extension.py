"""The C++ part: the wheel's, or compiled when a version of PyTorch first needs it, with that version's headers, and kept.

It is for one version of PyTorch, and for any version of Python: what it has are operators and a class of PyTorch's.
"""

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from . import library, operators, replaced

HERE = Path(__file__).resolve().parent
NAME = "flow_torch.so"
VERSION = torch.__version__.split("+")[0]
# A slow machine takes a minute or two.
COMPILE_TIMEOUT = 600
_loaded = []
_loading = threading.Lock()


def is_loaded():
    return bool(_loaded) and not isinstance(_loaded[0], Exception)


def load():
    """The namespace of its operators, or the ImportError that the first call has raised."""
    with _loading:
        if not _loaded:
            try:
                _loaded.append(_load())
            except (ImportError, OSError) as error:
                _loaded.append(error)
    if isinstance(_loaded[0], Exception):
        raise ImportError(str(_loaded[0]))
    return _loaded[0]


def _load():
    flow = _operators()
    operators.install()
    flow.use_interrupt_check()
    replaced.wait_for_futures(flow.wait_for, flow.complete_deferred)
    replaced.shorten_all_reduce(flow.all_reduce_at_once.default)
    library.at_end.append(flow.end_all)
    return flow


def _operators():
    library.load()
    if prebuilt().exists():
        try:
            return operators_of(prebuilt())
        except OSError as error:
            print(f"flow_torch: {prebuilt()} cannot be loaded, and is compiled anew: {error}", file=sys.stderr, flush=True)
    built = compiled()
    if not built.exists():
        build_once(built)
    return operators_of(built)


def origin():
    """Says where `load` gets the part from, for flow-launch doctor; compiles nothing. An ImportError or OSError says why there is none."""
    library.load()
    with contextlib.suppress(OSError):  # then it is compiled anew
        if prebuilt().exists():
            operators_of(prebuilt())
            return f"its C++ part is {prebuilt()}"
    if compiled().exists():
        operators_of(compiled())
        return f"its C++ part is {compiled()}"
    return f"its C++ part is compiled at first use, by {compiler()[0]}"


def prebuilt():
    return HERE / "lib" / tag() / NAME


def compiled():
    return cache() / f"{tag()}-{key()}" / NAME


def operators_of(file):
    torch.ops.load_library(str(file))
    return torch.ops.flow


def tag():
    """Names the PyTorch that it is for."""
    return f"torch-{VERSION}"


def key():
    """Returns a key of all else that the result depends on."""
    hashed = hashlib.sha256()
    for source in [*sorted((HERE / "csrc").iterdir()), library.files()[1], Path(__file__)]:
        hashed.update(source.read_bytes())
    build = torch.__version__, torch.version.git_version, torch.compiled_with_cxx11_abi()
    hashed.update(repr((build, os.environ.get("CXX"))).encode())
    return hashed.hexdigest()[:16]


def cache():
    base = os.environ.get("FLOW_CACHE") or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        raise ImportError(f"flow_torch: there is no folder for its C++ part: FLOW_CACHE is to be an absolute path, not {base!r}")
    return Path(base) / ("flow_torch" if os.environ.get("FLOW_CACHE") else "flow/flow_torch")


def compiler():
    """The command, without the file to make."""
    own = Path(torch.__file__).resolve().parent
    headers = own / "include"
    if not (headers / "torch/csrc/distributed/c10d/Backend.hpp").exists():
        raise ImportError(f"flow_torch: {headers} has no headers of PyTorch's: install PyTorch as its wheel has it")
    cxx = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(cxx[0]) is None:
        raise ImportError(f"flow_torch: its C++ part is compiled at first use, and there is no {cxx[0]}: install g++, or set CXX")
    return [
        *cxx,
        *["-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden"],
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *[f"-I{folder}" for folder in (library.files()[1].parent, headers, headers / "torch/csrc/api/include")],
        str(HERE / "csrc" / "module.cpp"),
        *[f"-L{own / 'lib'}", "-lc10", "-ltorch_cpu"],
    ]


def build_once(built):
    """However many ranks come at the same time; those that wait while it fails do not try again."""
    command = compiler()
    built.parent.mkdir(parents=True, exist_ok=True)
    failure = built.parent / "failure"
    before = modified(failure)
    with open(built.parent / "lock", "w") as lock:
        until_locked(lock)
        if built.exists():
            return
        if modified(failure) == before:
            print(f"flow_torch: compiling for PyTorch {torch.__version__}, once: some 30 seconds ({built})", file=sys.stderr, flush=True)
            build(command, built, failure)
    if not built.exists():
        lines = failure.read_text().splitlines()
        first = next((line for line in lines if "error" in line), lines[-1] if lines else "it does not say why")
        raise ImportError(f"flow_torch: its C++ part does not compile: {first} (all that {command[0]} says: {failure})")


def build(command, built, failure):
    """Writes what the compiler says to `failure`, if it fails."""
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder) / built.name
        try:
            subprocess.run(
                [*command, "-o", str(made)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COMPILE_TIMEOUT, check=True
            )
            made.replace(built)
        except (subprocess.SubprocessError, OSError) as error:
            said = getattr(error, "stdout", None) or b""
            failure.write_text(f"{said.decode(errors='replace')}{type(error).__name__}: {error}\n")


def until_locked(lock):
    end = time.monotonic() + COMPILE_TIMEOUT
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise ImportError(f"flow_torch: another process has compiled for {COMPILE_TIMEOUT} s, and holds {lock.name}") from None
            time.sleep(0.05)


def modified(file):
    return file.stat().st_mtime_ns if file.exists() else None


def main(folder):
    """Compiles it for the wheel, to FOLDER/TAG."""
    made = Path(folder) / tag()
    made.mkdir(parents=True)
    failure = made / "failure"
    build([*compiler(), "-DFLOW_MANYLINUX"], made / NAME, failure)
    if failure.exists():
        sys.exit(failure.read_text())


if __name__ == "__main__":
    main(sys.argv[1])
