"""Python begins with this where its folder is on PYTHONPATH: PyTorch then costs a test a third less.

`import torch` makes some 240,000 objects that live until the end. The garbage collector does not look at them: not while they are made,
not later, and not at the end of the program.
"""

import gc
import sys
from importlib.machinery import PathFinder


class Torch:
    """Finds torch, once."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(Torch)
        spec = PathFinder.find_spec(name, path, target)
        if spec and spec.loader:
            spec.loader.exec_module = uncollected(spec.loader.exec_module)
        return spec


def uncollected(execute):
    def call(module):
        gc.disable()
        try:
            execute(module)
        finally:
            gc.freeze()
            gc.enable()

    return call


sys.meta_path.insert(0, Torch)
