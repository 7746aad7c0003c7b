"""Gets the Python libraries that the launcher is tested with from PyPI. Called by scripts/setup.

usage: python_libraries.py REQUIREMENTS PYTHON FOLDER

FOLDER, for PYTHONPATH, appears whole or not at all. A library that cannot be built, or that PYTHON, which has PyTorch,
cannot import, is left out.
"""

import os
import shutil
import subprocess
import sys

import libtorch

FREE_GB = 0.5
MODULES = ["accelerate", "deepspeed", "ignite", "lightning", "torchft", "transformers"]
# PyPI has no wheel of it.
FROM_SOURCE = "deepspeed"


def main(requirements, python, folder):
    version = "{}.{}".format(*sys.version_info)
    with open(requirements, encoding="utf-8") as lines:
        packages = [line.strip() for line in lines if not line.startswith("#")]

    def install(partial, lock, packages, **options):
        target = ["install", "--no-deps", "--no-compile", f"--target={partial}"]
        libtorch.pip(partial, lock, *target, *packages, python=version, **options)

    def get(partial, lock):
        libtorch.say(f"getting {len(packages)} Python libraries from PyPI, 36 MB")
        install(partial, lock, [package for package in packages if not package.startswith(FROM_SOURCE)])
        try:
            source = [package for package in packages if package.startswith(FROM_SOURCE)]
            install(partial, lock, source, formats=f"--no-binary={FROM_SOURCE}")
        except SystemExit:
            libtorch.say(f"{FROM_SOURCE} is left out: it could not be built")

        # Leaves compiled what is imported, also where Python is told not to.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPATH"] = partial
        for module in MODULES:
            path = os.path.join(partial, module)
            command = [python, "-c", f"import {module}"]
            child = subprocess.run(command, env=environment, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
            if os.path.exists(path) and child.returncode != 0:
                reason = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
                libtorch.say(f"{module} is left out: {reason}")
                shutil.rmtree(path)

    libtorch.fill_once(folder, FREE_GB, get)


if __name__ == "__main__":
    libtorch.run(main)
