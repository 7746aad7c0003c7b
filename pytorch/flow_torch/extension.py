"""The C++ part: compiled when a version of PyTorch first needs it, with that version's headers, and kept."""

import ctypes
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
NAME = "_flow"


@functools.cache
def load():
    """The module."""
    library, header = flow_comm()
    # What is built is not linked with it, and so serves wherever it lies.
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    # All that the result depends on.
    key = hashlib.sha256()
    for source in [*sorted((HERE / "csrc").iterdir()), header, Path(__file__)]:
        key.update(source.read_bytes())
    for name in ("FLOW_TORCH_INCLUDE", "CXX"):
        key.update(f"{name}={os.environ.get(name, '')};".encode())
    built = cache() / f"torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}-{key.hexdigest()[:16]}" / f"{NAME}.so"
    if not built.exists():
        build(compiler(header.parent), built)
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(built))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(NAME, loader))
    loader.exec_module(module)
    return module


def flow_comm():
    """libflow_comm.so and its header: the wheel's, or those of the checkout."""
    inside = HERE / "lib" / "libflow_comm.so", HERE / "include" / "flow_comm.h"
    if inside[0].exists():
        return inside
    root = HERE.parent.parent
    library = root / "target" / "release" / "libflow_comm.so"
    if not library.exists():
        raise ImportError(f"flow_torch: {library} is missing: cargo build --release -p flow-capi makes it")
    return library, root / "capi" / "include" / "flow_comm.h"


def cache():
    base = os.environ.get("FLOW_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flow"
    return Path(base) / "flow_torch"


def compiler(include):
    """The command, without the file to make."""
    own = Path(torch.__file__).resolve().parent
    headers = Path(os.environ.get("FLOW_TORCH_INCLUDE") or own / "include")
    python = Path(sysconfig.get_paths()["include"])
    for folder, file, hint in [
        (headers, "torch/csrc/distributed/c10d/Backend.hpp", "FLOW_TORCH_INCLUDE names the folder of PyTorch's headers"),
        (python, "Python.h", "Debian and Ubuntu have it in python3-dev"),
    ]:
        if not (folder / file).exists():
            raise ImportError(f"flow_torch: {folder / file} is missing, with which its C++ part is compiled: {hint}")
    cxx = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(cxx[0]) is None:
        raise ImportError(f"flow_torch: its C++ part is compiled at first use, and there is no {cxx[0]}: install g++, or set CXX")
    return [
        *cxx,
        *["-O2", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden"],
        *[f"-DTORCH_EXTENSION_NAME={NAME}", "-DTORCH_API_INCLUDE_EXTENSION_H"],
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *[f"-I{folder}" for folder in (include, headers, headers / "torch/csrc/api/include", python)],
        str(HERE / "csrc" / "backend.cpp"),
        *[f"-L{own / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"],
    ]


def build(command, built):
    """Compiles once, however many ranks come at the same time."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with open(built.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if built.exists():
            return
        print(f"flow_torch: compiling for PyTorch {torch.__version__}, once: some 30 seconds ({built})", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            made = Path(folder) / built.name
            compiled = subprocess.run([*command, "-o", str(made)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if compiled.returncode != 0:
                raise ImportError(f"flow_torch: its C++ part does not compile:\n{' '.join(compiled.args)}\n{compiled.stdout}")
            made.replace(built)
