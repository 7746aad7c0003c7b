"""libflow_comm.so, over which the C++ part and its replacement in Python work."""

import atexit
import contextlib
import ctypes
import functools
import os
from pathlib import Path

# What the parts do at the end of the program, while Python is still there.
at_end = []

HERE = Path(__file__).resolve().parent


@atexit.register
def _end():
    with contextlib.ExitStack() as all_ends:  # also after one that is interrupted
        for end in reversed(at_end):
            all_ends.callback(end)


@functools.cache
def load():
    """The library, with its functions where the C++ part finds them: that is not linked with it, and serves wherever it lies."""
    library, _ = files()
    try:
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ImportError(f"flow_torch: {library} cannot be loaded: {error}") from None


def files():
    """The library and its header: the wheel's, or those of the checkout. FLOW_COMM_LIBRARY names another library."""
    root = HERE.parent.parent
    library, header = HERE / "lib" / "libflow_comm.so", HERE / "include" / "flow_comm.h"
    if not header.exists():
        target = root / (os.environ.get("CARGO_TARGET_DIR") or "target")
        library, header = target / "release" / "libflow_comm.so", root / "capi" / "include" / "flow_comm.h"
    library = Path(os.environ.get("FLOW_COMM_LIBRARY") or library)
    if not library.exists():
        raise ImportError(f"flow_torch: {library} is missing: in a checkout, cargo build --release -p flow-capi makes it")
    return library, header
