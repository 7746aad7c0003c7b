"""Puts a command `torchrun` that is flow-launch into a folder: `python -m flow_launch.torchrun FOLDER`.

The wheel itself brings no `torchrun`: PyTorch's wheel has one, and two packages cannot own one file.
"""

from __future__ import annotations

import os
import shutil
import sys

MARK = "# torchrun by flow-launch"
SCRIPT = f"""#!{sys.executable}
{MARK}
import runpy
runpy.run_module("flow_launch.run", run_name="__main__")
"""


def main(args: list[str]):
    if len(args) != 1 or args[0].startswith("-"):
        sys.exit("usage: python -m flow_launch.torchrun FOLDER")
    folder = os.path.abspath(args[0])
    path = os.path.join(folder, "torchrun")
    try:
        os.makedirs(folder, exist_ok=True)
        if os.path.lexists(path) and MARK not in open(path, errors="replace").read():
            sys.exit(f"flow_launch.torchrun: {path} is another torchrun; name a folder of your own, and put it on PATH first")
        with open(path, "w") as file:
            file.write(SCRIPT)
        os.chmod(path, 0o755)
    except OSError as error:
        sys.exit(f"flow_launch.torchrun: cannot write {path}: {error.strerror}")
    is_first = shutil.which("torchrun") == path
    print(f"{path} is flow-launch" + ("" if is_first else f'; to have it found first: export PATH="{folder}:$PATH"'))


if __name__ == "__main__":
    main(sys.argv[1:])
