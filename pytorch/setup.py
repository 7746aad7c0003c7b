"""The wheel: Python, the sources of the C++ part, and libflow_comm.so, which cargo builds or FLOW_COMM_LIBRARY names."""

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
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / "libflow_comm.so"


class Build(build_py):
    def run(self):
        super().run()
        package = Path(self.build_lib) / "flow_torch"
        for source, folder in [(library(), "lib"), (ROOT / "capi" / "include" / "flow_comm.h", "include")]:
            (package / folder).mkdir(parents=True, exist_ok=True)
            shutil.copy(source, package / folder)
        subprocess.run(["strip", "--strip-unneeded", package / "lib" / "libflow_comm.so"], check=True)


class Wheel(bdist_wheel):
    """For any Python 3, on systems with the C library that libflow_comm.so is linked with, or a newer one."""

    def get_tag(self):
        built = Path(self.get_finalized_command("build").build_lib) / "flow_torch" / "lib" / "libflow_comm.so"
        glibc = max(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", built.read_bytes()))
        return "py3", "none", f"manylinux_2_{glibc}_{platform.machine()}"


class Binary(Distribution):
    def has_ext_modules(self):
        return True


version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE).group(1)
setup(version=version, distclass=Binary, cmdclass={"build_py": Build, "bdist_wheel": Wheel})
