"""A worker that calls a function: see call.py. Started as a script; its own folder is not on the path for long."""

import faulthandler
import fcntl
import json
import os
import pickle
import sys
import time
import traceback
from multiprocessing import spawn


def main(called, returned):
    faulthandler.enable(all_threads=True)
    try:
        with open(called, "rb") as file:
            spawn.prepare(pickle.load(file))
            function, arguments = pickle.load(file)
        result = pickle.dumps(function(*arguments))
    except Exception as error:
        record(error)
        raise
    with open(returned, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        pickle.dump((int(os.environ["RANK"]), result), file)


def record(error):
    """Leaves the error for flow-launch, as PyTorch's @record does for torchrun."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with open(path, "w") as file:
        json.dump({"message": message}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
