"""Takes what the checks of the CUDA code need where there is no GPU from PyPI's wheels. Called by scripts/setup.

usage: cuda_tools.py FOLDER PACKAGE==VERSION...

FOLDER appears whole or not at all, and has only the files below.
"""

import os

import libtorch

FILES = ["libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "nccl.h", "libnccl.so.2", "libclang.so"]
FREE_GB = 1.5


def main(folder, *packages):
    def get(partial, lock):
        libtorch.say("getting NVRTC, NCCL and libclang from PyPI, 310 MB")
        for wheel in libtorch.wheels(partial, lock, *packages):
            for member in wheel.infolist():
                member.filename = os.path.basename(member.filename)
                if member.filename in FILES:
                    wheel.extract(member, partial)
        missing = [name for name in FILES if not os.path.exists(os.path.join(partial, name))]
        if missing:
            libtorch.fail(f"the wheels of {', '.join(packages)} have no {', '.join(missing)}")

    libtorch.fill_once(folder, FREE_GB, get)


if __name__ == "__main__":
    libtorch.run(main)
