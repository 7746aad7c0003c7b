import os
import sys


def tell(*values):
    """Prints a rank's result in one write, for torchrun does not keep lines apart."""
    assert "FLOW_STORE" in os.environ or "MUST_BE_FLOW_LAUNCH" not in os.environ
    print(" ".join(["result:", *map(str, values)]) + "\n", end="", flush=True)


def end():
    """Ends this process without Python's finalization.

    There gloo's threads abort a process now and then, under any launcher.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
