"""The wheel: the command flow-launch, the packages flow_launch and flow_torch, and libflow_comm.so. It serves any Python 3.

FLOW_BINARIES names a folder that has flow-launch and libflow_comm.so; otherwise cargo builds them. flow_torch's C++ part is compiled for the
PyTorch of each Python that FLOW_TORCH_PYTHONS names. PyTorch of other versions compiles it at first use.
"""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

from distutils.command.build_scripts import build_scripts  # setuptools has it, which must be imported before

ROOT = Path(__file__).resolve().parent
# What flow_torch's C++ part keeps to, in csrc/manylinux.h.
OLDEST_GLIBC = 28


def binary(name):
    """The file of this name that cargo makes."""
    prebuilt = os.environ.get("FLOW_BINARIES")
    if prebuilt:
        return Path(prebuilt) / name
    subprocess.run(["cargo", "build", "--release", "--locked", "-p", "flow-launch", "-p", "flow-capi"], cwd=ROOT, check=True)
    return ROOT / (os.environ.get("CARGO_TARGET_DIR") or "target") / "release" / name


def copy_stripped(file, folder):
    folder.mkdir(parents=True, exist_ok=True)
    made = shutil.copy(file, folder)
    subprocess.run([os.environ.get("STRIP", "strip"), "--strip-unneeded", made], check=True)


def machine_of(file):
    """The processor that an ELF file is for."""
    return {62: "x86_64", 183: "aarch64"}.get(int.from_bytes(file.read_bytes()[18:20], "little"), platform.machine())


class Packages(build_py):
    def run(self):
        # Of an earlier build there may be files that are no more.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        package = Path(self.build_lib) / "flow_torch"
        copy_stripped(binary("libflow_comm.so"), package / "lib")
        (package / "include").mkdir(exist_ok=True)
        shutil.copy(ROOT / "capi" / "include" / "flow_comm.h", package / "include")
        for python in os.environ.get("FLOW_TORCH_PYTHONS", "").split():
            environment = {
                **os.environ,
                "PYTHONPATH": str(ROOT / "pytorch"),
                "FLOW_COMM_LIBRARY": str(package.resolve() / "lib" / "libflow_comm.so"),
            }
            subprocess.run([python, "-m", "flow_torch.extension", str(package / "lib")], env=environment, check=True)
        for part in package.glob("lib/*/*.so"):
            subprocess.run(["strip", "--strip-unneeded", part], check=True)


class Command(build_scripts):
    def get_source_files(self):
        return []

    def run(self):
        copy_stripped(binary("flow-launch"), Path(self.build_dir))


class Wheel(bdist_wheel):
    """For any Python 3, on systems with the C library that the binaries are linked with, or a newer one."""

    def get_tag(self):
        built = self.get_finalized_command("build")
        binaries = [*Path(built.build_lib).glob("flow_torch/lib/**/*.so"), *Path(built.build_scripts).glob("flow-launch")]
        needed = [re.findall(rb"GLIBC_2\.(\d+)", file.read_bytes()) for file in binaries]
        glibc = max(OLDEST_GLIBC, *(int(minor) for minors in needed for minor in minors))
        return "py3", "none", f"manylinux_2_{glibc}_{machine_of(binaries[-1])}"


class Binary(Distribution):
    def has_ext_modules(self):
        return True


version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE).group(1)
# Not beside setup.py: Python would take its egg-info there for an installed package whenever it runs in this folder.
made = ROOT / "target" / "wheel"
made.mkdir(parents=True, exist_ok=True)
options = {"egg_info": {"egg_base": str(made)}, "build": {"build_base": str(made)}}
commands = {"build_py": Packages, "build_scripts": Command, "bdist_wheel": Wheel}
setup(version=version, scripts=["flow-launch"], distclass=Binary, cmdclass=commands, options=options)
