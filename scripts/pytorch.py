"""Makes a Python environment with PyTorch for CPUs from PyPI's wheels. Called by scripts/setup.

usage: pytorch.py VERSION FOLDER

FOLDER/bin/python3 is this Python, with torch. FOLDER appears whole or not at all. PyPI's torch is linked with CUDA, 2 GB
to load that a CPU has no use for. In place of libtorch_cuda.so, and of the libraries that only CUDA's side needs, it gets
one that has the names which the linker looks for, and ends a process that calls one of them.
"""

import os
import re
import subprocess
import sys
import venv

import libtorch

FREE_GB = 2.5
NOT_NEEDED = re.compile(r"nvidia/cu13/(include|share)/|torch/share/|torch/bin/(?!torch_shm_manager)")
# libtorch_python.so itself is linked with these, of NCCL since PyTorch 2.14.
OTHER_LIBRARIES = ["libcudnn.so.9", "libcufile.so.0", "libnccl.so.2"]
OTHER_FUNCTIONS = re.compile("cudnn|cuFile|nccl")

# The names are those of C++, mangled. Two are called as torch is imported: the reference is one that it assigns to; the object, one that
# it makes for a function's default and keeps, is of zeros, which its destructor takes for empty members.
STAND_IN = r"""
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
struct type_info { void **vtable; const char *name; };
extern void *_ZTVN10__cxxabiv117__class_type_infoE[];
static void *called(const char *name) {
    fprintf(stderr, "this PyTorch is without CUDA (made by scripts/setup --pytorch), but was asked for %s\n", name);
    abort();
}
#define FUNCTION(name) void *name(void) { return called(#name); }
#define REFERENCE(name) void *name(void) { static void *value; return &value; }
#define OBJECT(name) \
    extern void *_ZTVN4c10d16ProcessGroupNCCL7OptionsE[]; \
    void name(void **object) { \
        memset(object, 0, malloc_usable_size(object)); \
        *object = _ZTVN4c10d16ProcessGroupNCCL7OptionsE + 2; \
    }
#define TYPE(name) struct type_info name = {_ZTVN10__cxxabiv117__class_type_infoE + 2, #name + 4};
#define VTABLE(name) void *name[64];
"""
KINDS = {
    "_ZN4c10d15get_gil_checkerEv": "REFERENCE",
    "_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb": "OBJECT",  # since PyTorch 2.15
}
KINDS_BY_PREFIX = {"_ZTI": "TYPE", "_ZTV": "VTABLE"}


def definition(name):
    kind = KINDS.get(name) or KINDS_BY_PREFIX.get(name[:4], "FUNCTION")
    return f"{kind}({name})\n"


def symbols(which, *libraries):
    """The names of libraries' dynamic symbols; `which` is nm's option."""
    lines = subprocess.run(["nm", "-DP", which, *libraries], stdout=subprocess.PIPE, text=True, check=True).stdout
    return {re.split("[ @]", line)[0] for line in lines.splitlines()}


def replace_cuda(folder):
    """Puts a replacement where libtorch_cuda.so was, in torch's folder of libraries."""

    def paths(*names):
        return [os.path.join(folder, f"lib{name}.so") for name in names]

    cuda = paths("torch_cuda", "torch_cuda_linalg", "torch_nvshmem")
    wanted = symbols("--undefined-only", *paths("torch_python"))
    elsewhere = symbols("--defined-only", *paths("torch", "torch_cpu", "c10", "c10_cuda", "shm"))
    names = symbols("--defined-only", *cuda) & wanted - elsewhere
    names |= {name for name in wanted if OTHER_FUNCTIONS.match(name)}
    for library in cuda:
        os.remove(library)
    command = ["cc", "-shared", "-fPIC", "-xc", "-", "-o", cuda[0], "-Wl,-soname,libtorch_cuda.so", "-lstdc++"]
    subprocess.run(command, input=STAND_IN + "".join(map(definition, sorted(names))), text=True, check=True)
    for name in OTHER_LIBRARIES:
        os.symlink("libtorch_cuda.so", os.path.join(folder, name))


def deny_cuda(torch):
    """Has torch say that it is without CUDA: since PyTorch 2.15 it asks that, as it is imported, before it looks for kernels."""
    path = os.path.join(torch, "backends", "cuda", "__init__.py")
    with open(path, encoding="utf-8") as file:
        before, answer, after = file.read().partition("return torch._C._has_cuda\n")
    if not answer:
        libtorch.fail(f"{path} does not say any more whether this torch has CUDA: see {__file__}")
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"{before}return False\n{after}")


def main(version, folder):
    python = "{}.{}".format(*sys.version_info)

    def get(partial, lock):
        libtorch.say(f"getting torch {version} for Python {python} from PyPI, 570 MB")
        venv.create(partial, symlinks=True)
        packages = os.path.join(partial, "lib", f"python{python}", "site-packages")
        for wheel in libtorch.wheels(partial, lock, f"torch=={version}", *libtorch.NVIDIA_FOR_CPU, python=python):
            wheel.extractall(packages, [name for name in wheel.namelist() if not NOT_NEEDED.match(name)])
        torch = os.path.join(packages, "torch")
        os.chmod(os.path.join(torch, "bin", "torch_shm_manager"), 0o755)
        replace_cuda(os.path.join(torch, "lib"))
        deny_cuda(torch)

        # What it needs on every system, so nothing of NVIDIA's, and NumPy, without which it warns.
        with open(os.path.join(packages, f"torch-{version}.dist-info", "METADATA"), encoding="utf-8") as lines:
            needed = re.findall(r"^Requires-Dist: ([^;\n]*)$", lines.read(), re.MULTILINE)
        libtorch.pip(partial, lock, "install", "--no-compile", f"--target={packages}", *needed, "numpy", python=python)

        # Shows that it works, and leaves compiled what most scripts import, also where Python is told not to.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        program = "import torch, torch._dynamo, torch.distributed.run, torch.utils.data; torch.ones(1)"
        subprocess.run([os.path.join(partial, "bin", "python3"), "-c", program], env=environment, check=True)

    libtorch.fill_once(folder, FREE_GB, get)


if __name__ == "__main__":
    libtorch.run(main)
