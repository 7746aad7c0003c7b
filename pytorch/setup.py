"""The wheel: Python, the sources of the C++ part, and libflow_comm.so, which cargo builds or FLOW_COMM_LIBRARY names. With the C++ part
compiled for the Pythons, each with its PyTorch, that FLOW_TORCH_PYTHONS names."""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent.parent


def library():
    prebuilt = os.environ.get("FLOW_COMM_LIBRARY")
    if prebuilt:
        return Path(prebuilt)
    subprocess.run(["cargo", "build", "--release", "--locked", "-p", "flow-capi"], cwd=ROOT, check=True)
    return ROOT / (os.environ.get("CARGO_TARGET_DIR") or "target") / "release" / "libflow_comm.so"


class Build(build_py):
    def run(self):
        super().run()
        package = Path(self.build_lib) / "flow_torch"
        # Of an earlier build there may be parts for other versions.
        shutil.rmtree(package / "lib", ignore_errors=True)
        for source, folder in [(library(), "lib"), (ROOT / "capi" / "include" / "flow_comm.h", "include")]:
            (package / folder).mkdir(parents=True, exist_ok=True)
            shutil.copy(source, package / folder)
        for python in os.environ.get("FLOW_TORCH_PYTHONS", "").split():
            environment = {
                **os.environ,
                "PYTHONPATH": str(ROOT / "pytorch"),
                "FLOW_COMM_LIBRARY": str(package.resolve() / "lib" / "libflow_comm.so"),
            }
            subprocess.run([python, "-m", "flow_torch.extension", str(package / "lib")], env=environment, check=True)
        for file in package.glob("lib/**/*.so"):
            subprocess.run(["strip", "--strip-unneeded", file], check=True)


class Wheel(bdist_wheel):
    """For any Python 3, on systems with the C library that the binaries are linked with, or a newer one."""

    def get_tag(self):
        built = Path(self.get_finalized_command("build").build_lib) / "flow_torch"
        needed = [re.findall(rb"GLIBC_2\.(\d+)", file.read_bytes()) for file in built.glob("lib/**/*.so")]
        glibc = max(int(minor) for minors in needed for minor in minors)
        return "py3", "none", f"manylinux_2_{glibc}_{platform.machine()}"


class Binary(Distribution):
    def has_ext_modules(self):
        return True


version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE).group(1)
setup(version=version, distclass=Binary, cmdclass={"build_py": Build, "bdist_wheel": Wheel})
