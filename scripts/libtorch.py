"""Finds libtorch in an installed Python torch, or takes it from PyPI's torch wheel. Called by scripts/setup, and by
flow-launch setup-libtorch, which has this file as a text: it imports nothing beside it.

usage: libtorch.py VERSION cpu|cuda FOLDER

Prints the libtorch folder: the installed torch's, or FOLDER/torch, which appears whole or not at all. Beside it lie the
NVIDIA libraries that libtorch_cpu.so itself needs, where its RPATH looks for them.
"""

import fcntl
import glob
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile

# What libtorch_cpu.so of the CUDA 13.0 wheel is linked with, GPU or not.
NVIDIA_FOR_CPU = ["nvidia-cuda-runtime==13.0.96", "nvidia-cuda-cupti==13.0.85"]
WHEEL_PARTS_FOR_CPU = re.compile(
    r"torch/include/|torch/lib/lib(?!.*(cuda|nvrtc|nvshmem|python|shm|global_deps))[^/]*\.so|nvidia/cu13/lib/"
)
DOWNLOAD = {"cpu": "530 MB", "cuda": "about 2.5 GB"}
FREE_GB = {"cpu": 2.5, "cuda": 12}


def say(message):
    print(f"setup: {message}", file=sys.stderr, flush=True)


def fail(message):
    say(f"error: {message}")
    sys.exit(1)


def installed_torch(version, libraries):
    """The folder of Python's own torch, found without importing it, if it is the right one."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or []:
        with_dist_info = glob.glob(os.path.join(os.path.dirname(folder), f"torch-{version}[.+]*dist-info"))
        if with_dist_info and os.path.exists(os.path.join(folder, "lib", f"libtorch_{libraries}.so")):
            return folder
    return None


def pip(partial, lock, *arguments, python="3.12", formats="--only-binary=:all:"):
    """Runs pip for that Python, whatever runs it itself, with its temporary files in `partial` too."""
    machine = platform.machine()
    command = [
        sys.executable,
        "-m",
        "pip",
        *arguments,
        formats,
        f"--python-version={python}",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--retries=2",
        "--timeout=30",
    ]
    tags = [*(f"_2_{glibc}" for glibc in range(28, 16, -1)), "2014"]
    command += [f"--platform=manylinux{tag}_{machine}" for tag in tags]
    if not sys.stderr.isatty():
        command.append("--quiet")
    # pip holds the lock as well: should we be killed, nobody removes its folder while it still writes there.
    child = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": partial},
        pass_fds=[lock.fileno()],
    )
    if child.returncode != 0:
        errors = (
            [line for line in child.stderr.splitlines() if line.startswith("ERROR")]
            or child.stderr.splitlines()
            or [""]
        )
        fail(f"pip could not get the wheels; is there a network? It said: {errors[0]}")


def wheels(partial, lock, *requirements, **options):
    """Opens the wheels of these packages, one after the other; they are gone at the end."""
    folder = os.path.join(partial, "wheels")
    pip(partial, lock, "download", "--no-deps", f"--dest={folder}", *requirements, **options)
    say("unpacking")
    for path in glob.glob(os.path.join(folder, "*.whl")):
        with zipfile.ZipFile(path) as wheel:
            yield wheel
    shutil.rmtree(folder)


def get_cpu(version, partial, lock):
    for wheel in wheels(partial, lock, f"torch=={version}", *NVIDIA_FOR_CPU):
        wheel.extractall(partial, [name for name in wheel.namelist() if WHEEL_PARTS_FOR_CPU.match(name)])


def get_cuda(version, partial, lock):
    pip(partial, lock, "install", "--no-deps", f"--target={partial}", f"torch=={version}")
    [metadata] = glob.glob(os.path.join(partial, f"torch-{version}*dist-info", "METADATA"))
    with open(metadata, encoding="utf-8") as lines:
        needed = re.findall(r"^Requires-Dist: ((?:cuda-toolkit|nvidia-)[^;\n]*)", lines.read(), re.MULTILINE)
    pip(partial, lock, "install", f"--target={partial}", *(requirement.strip() for requirement in needed))


def fill_once(folder, needed, get):
    """Has `get(partial, lock)` make the folder, for which it needs that many GB, if it is not there yet."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        fail(f"no wheels for {sys.platform} {platform.machine()}: set LIBTORCH to an unpacked libtorch, do without others")
    if importlib.util.find_spec("pip") is None:
        fail("pip is missing: install it (Debian, Ubuntu: apt-get install python3-pip)")

    cache = os.path.dirname(folder)
    os.makedirs(cache, exist_ok=True)
    with open(os.path.join(cache, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another set-up may be at it
        if os.path.exists(folder):
            return
        partial = folder + ".partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a set-up that was killed
        free = shutil.disk_usage(cache).free / 1e9
        if free < needed:
            fail(f"{cache} has {free:.1f} GB free, {needed} are needed: free some, or set FLOW_CACHE to another folder")
        os.mkdir(partial)
        try:
            get(partial, lock)
            os.rename(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def main(version, libraries, folder):
    found = installed_torch(version, libraries)
    if found:
        print(found)
        return

    def get(partial, lock):
        say(f"getting torch {version} ({libraries}) from PyPI, {DOWNLOAD[libraries]}")
        (get_cpu if libraries == "cpu" else get_cuda)(version, partial, lock)

    fill_once(folder, FREE_GB[libraries], get)
    print(os.path.join(folder, "torch"))


def run(main):
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
    except (OSError, subprocess.CalledProcessError) as error:
        fail(error)


if __name__ == "__main__":
    run(main)
